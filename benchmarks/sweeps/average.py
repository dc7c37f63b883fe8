"""Compare averages of the last checkpoints of the runs of sweeps/averaging.yaml with the last one.

Usage: PYTHONPATH=. python benchmarks/sweeps/average.py --runs runs/sweeps/averaging
       (writes averaging.json, averaging.md and averaging_1.svg)
       PYTHONPATH=. python benchmarks/sweeps/average.py    (page and figure from the JSON)

`hlat average` writes the averages, and the engine evaluates them as in training, with the dtypes of
the recipe. The differences to the last checkpoint are paired by seed.
"""

import argparse
import json
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.averaging.run import measure
from hlat.average import main as average
from hlat.checkpoint.checkpoint_directory import parse_step
from hlat.config.study import StudyConfig
from hlat.engine.engine_factory import create_engine
from hlat.study.paired_test import PointRuns
from hlat.study.run_comparison import list_run_dirs
from hlat.study.run_record import load_run_record
from hlat.study.study_analysis import Comparison, Point, analyze_study
from hlat.study.study_tables import build_effect_table
from hlat.tracking.text_format import format_markdown_table

HERE = Path(__file__).resolve().parent
NAME = "averaging"
COUNTS, STRIDES = (2, 3, 5), (1, 2, 4)
"""Numbers of averaged checkpoints, and their distances in saved checkpoints."""
LAST = "last"
KEY = "checkpoints"
DESIGN = StudyConfig(baseline={KEY: LAST}, smallest_difference=0.01)
Json = dict[str, Any]


def list_averages(steps: list[int]) -> dict[str, list[int]]:
    """Return the steps of each average by label, given those of all checkpoints in order."""
    distance, *others = {b - a for a, b in pairwise(steps)}
    if others or len(steps) <= max(STRIDES) * (max(COUNTS) - 1):
        sys.exit(f"steps {steps} are not equally distant, or too few")
    return {
        f"{count}, {stride * distance} steps apart": steps[::-stride][:count][::-1]
        for stride in STRIDES
        for count in COUNTS
    }


def evaluate_run(run: Path) -> dict[str, dict[str, float]]:
    """Return the bits per byte by source of the last checkpoint of a run and of its averages."""
    config = load_run_record(run).valid_config
    engine = create_engine(config)
    engine.build(config)
    found_steps = {parse_step(path): path for path in (run / "checkpoints").glob("step_*")}
    checkpoints = {step: path for step, path in found_steps.items() if step is not None}
    steps = sorted(checkpoints)
    with tempfile.TemporaryDirectory() as directory:
        paths = {LAST: checkpoints[steps[-1]]}
        for label, averaged in list_averages(steps).items():
            paths[label] = Path(directory) / label
            words = [str(run), f"steps={','.join(map(str, averaged))}", f"output={paths[label]}"]
            if code := average(words):
                sys.exit(code)
        found = measure(engine, config, paths)
    engine.close()
    return {label: values["bits_per_byte"] for label, values in found.items()}


def collect(sweep: Path) -> Json:
    """Return the bits per byte of all finished runs by schedule and seed."""
    result: Json = {}
    for run in list_run_dirs([sweep]):
        record = load_run_record(run)
        if record.last_attempt_events[-1]["event"] == "finish":
            config = record.valid_config
            by_seed = result.setdefault(config.schedule.name, {})
            by_seed[str(config.run.seed)] = evaluate_run(run)
            print(f"{run.name}: evaluated", file=sys.stderr, flush=True)
    return result


def analyze(result: Json) -> list[Comparison]:
    """Return the comparison of each average with the last checkpoint, within each schedule."""
    points: dict[Point, PointRuns] = {
        (("schedule", schedule), (KEY, label)): PointRuns(
            {seed: found[label]["mean"] for seed, found in by_seed.items()}
        )
        for schedule, by_seed in result.items()
        for label in next(iter(by_seed.values()))
    }
    return analyze_study(points, DESIGN)


def draw_panel(axes: Axes, comparisons: list[Comparison], schedule: str) -> None:
    """Draw the differences of a schedule over the steps between the averaged checkpoints."""
    for shift, count in enumerate(COUNTS):
        found = [
            (int(label.split()[1]), one.difference)
            for one in comparisons
            if dict(one.point)["schedule"] == schedule
            and (label := dict(one.point)[KEY]).startswith(f"{count},")
        ]
        means = [one.mean for _, one in found]
        limits = [
            [one.mean - one.low for _, one in found],
            [one.high - one.mean for _, one in found],
        ]
        axes.errorbar(
            [steps * 1.04 ** (shift - 1) for steps, _ in found],
            means,
            limits,
            fmt="o-",
            markersize=4,
            capsize=2,
            label=f"{count} checkpoints",
        )
    steps = sorted({steps for steps, _ in found})
    axes.set_xscale("log")
    axes.set_xticks(steps, [str(each) for each in steps])
    axes.minorticks_off()
    axes.axhline(0, color="0.5", linewidth=0.8, linestyle=":")
    axes.set_title(f"{schedule} learning rate")
    axes.set_xlabel("steps between averaged checkpoints")


def draw(comparisons: list[Comparison]) -> Figure:
    """Return a panel for each schedule: average less last checkpoint."""
    schedules = list(dict.fromkeys(dict(one.point)["schedule"] for one in comparisons))
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    panels = figure.subplots(1, len(schedules), sharey=True, squeeze=False)[0]
    for axes, schedule in zip(panels, schedules, strict=True):
        draw_panel(axes, comparisons, schedule)
    panels[0].set_ylabel("bits per byte of the average,\nless the last checkpoint")
    panels[0].annotate("better", (0.03, 0.03), xycoords="axes fraction", color="0.4")
    panels[0].annotate("worse", (0.03, 0.93), xycoords="axes fraction", color="0.4")
    panels[-1].legend()
    return figure


def render(result: Json, comparisons: list[Comparison]) -> str:
    """Return question, figure and table of effects in Markdown."""
    table = format_markdown_table(*build_effect_table(comparisons, DESIGN))
    num_runs = sum(len(by_seed) for by_seed in result.values())
    return "\n".join(
        [
            "# averaging: Does the average of the last checkpoints score higher than the last one?",
            "",
            f"{num_runs} runs; held-out bits per byte, mean over the sources, lower is better. "
            "Design: [averaging.yaml](../../sweeps/averaging.yaml). Written by `average.py`.",
            "",
            "![Average less last checkpoint over the steps between the averaged checkpoints, for "
            f"each schedule and number of checkpoints; the values are below.]({NAME}_1.svg)",
            "",
            "Dots: means over seeds, paired by seed, with 95% intervals.",
            "",
            "Effects, paired by seed; p is corrected for all comparisons (Holm), each interval is "
            "not:",
            "",
            *table,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, help="directory of the sweep; default: read the JSON")
    parser.add_argument("--output", type=Path, default=HERE)
    arguments = parser.parse_args()
    recorded = arguments.output / f"{NAME}.json"
    if arguments.runs is not None:
        recorded.write_text(json.dumps(collect(arguments.runs)) + "\n")
    result = json.loads(recorded.read_text())
    comparisons = analyze(result)
    page = render(result, comparisons)
    recorded.with_suffix(".md").write_text(page)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "hlat"}):
        file = recorded.with_name(f"{NAME}_1.svg")
        draw(comparisons).savefig(file, metadata={"Date": None})
    print(page, end="")


if __name__ == "__main__":
    main()
