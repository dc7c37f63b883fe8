"""Summarize the runs of a study over its seeds: values, tables and a figure.

Usage: python benchmarks/sweeps/plot.py STUDY --runs runs   (writes STUDY.json, STUDY.md, STUDY.svg)
       python benchmarks/sweeps/plot.py STUDY               (the last two from STUDY.json)

Runs of one seed have the same initial weights and data. So each point is compared seed by seed with
its reference, the point with the first value of the last axis and the same values of the others.
Intervals, p values and verdicts are those of hlat.study, for the design in the study's YAML.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from hydra import compose, initialize_config_dir
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from omegaconf import OmegaConf

from hlat.config.batch import BatchConfig
from hlat.config.batch_steps import count_tokens
from hlat.config.compose import register_configs
from hlat.config.package_dirs import find_package_dir
from hlat.config.resolve import resolve_config
from hlat.config.study import StudyConfig
from hlat.study.difference_format import format_interval, format_metric, format_p_value
from hlat.study.paired_test import PointRuns, compute_mean_interval
from hlat.study.run_record import RunRecord, get_numbers, load_run_record
from hlat.study.study_analysis import Comparison, analyze_study, format_verdict

HERE = Path(__file__).resolve().parent
BLOCKS = 50
"""Number of equal parts of a run; the smoothed curve consists of their mean losses."""
INK, MUTED, GRID = "#1c2024", "#5a6470", "#dfe3e8"
COLOURS = ["#1c2024", "#c04f00", "#0072b2", "#007a5a", "#9b4a85"]
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "hlat",
}
Json = dict[str, Any]


SEED = "run.seed"


def axes_of(study: str) -> dict[str, list[str]]:
    """Return the swept keys of a study and their values."""
    sweep = OmegaConf.load(find_package_dir("sweeps") / f"{study}.yaml")
    axes = OmegaConf.to_container(OmegaConf.select(sweep, "hydra.sweeper.params"))
    assert isinstance(axes, dict)
    return {str(key): str(values).split(",") for key, values in axes.items()}


def points_of(study: str) -> dict[str, dict[str, str]]:
    """Return the names of all runs of a study by point and seed.

    The name depends on the settings only, so a point of two studies is trained once.
    """
    axes = axes_of(study)
    names: dict[str, dict[str, str]] = {}
    register_configs()
    with initialize_config_dir(config_dir=str(find_package_dir("conf")), version_base="1.3"):
        for values in itertools.product(*axes.values()):
            overrides = dict(zip(axes, values, strict=True))
            arguments = [f"{key}={value}" for key, value in overrides.items()]
            seed = overrides.pop(SEED)
            point = ", ".join(f"{key}={value}" for key, value in overrides.items())
            config = resolve_config(compose("config", [f"+sweep={study}", *arguments]))
            names.setdefault(point, {})[seed] = str(config.run.name)
    return names


def variance_around_line(values: NDArray[np.float64]) -> float:
    """Return the variance of the residuals of a least-squares line."""
    steps = np.arange(len(values))
    line = np.polyval(np.polyfit(steps, values, 1), steps)
    return float(((values - line) ** 2).sum() / (len(values) - 2))


def summarize(record: RunRecord) -> Json:
    """Return the values of one run.

    `loss` is the mean over the last tenth of the steps in nats per token, `loss_variance` the
    variance around a line over the last quarter, `bits_per_byte` the mean over the held-out sources
    at the end, `sources` each of them, `spikes` the number of spikes of the gradient norm
    (hlat.recovery.spike_detector). The curves have a point for each of BLOCKS parts and for each
    evaluation.
    """
    steps = np.array([row["step"] for row in record.metrics])
    loss = np.array([row["loss"] for row in record.metrics], np.float64)
    held_out = {step: get_numbers(row, "bits_per_byte") for step, row in record.evaluations.items()}
    bits = {step: row["mean"] for step, row in held_out.items()}
    last = held_out[max(held_out)]
    blocks = np.array_split(np.arange(len(loss)), BLOCKS)
    return {
        "run": record.name,
        "steps": int(steps[-1]),
        "loss": float(loss[-(len(loss) // 10) :].mean()),
        "loss_variance": variance_around_line(loss[-(len(loss) // 4) :]),
        "bits_per_byte": last["mean"],
        "sources": {source: value for source, value in last.items() if source != "mean"},
        "spikes": sum(event["event"] == "spike" for event in record.events),
        "loss_curve": [[int(steps[block[-1]]), float(loss[block].mean())] for block in blocks],
        "bits_curve": [[step, value] for step, value in bits.items()],
    }


def collect(study: str, runs: Path) -> Json:
    """Summarize the runs of a study by point and seed; unfinished ones have only the last event."""
    result: Json = {"study": study, "points": {}, "machines": []}
    for point, seeds in points_of(study).items():
        for seed, name in seeds.items():
            if not (runs / name / "events.jsonl").exists():
                continue
            record = load_run_record(runs / name)
            ended = record.last_attempt_events[-1]["event"]
            summary = summarize(record) if ended == "finish" else {"run": name, "ended": ended}
            result["points"].setdefault(point, {})[seed] = summary
            origin = record.provenance
            machine = {key: origin[key] for key in ("python", "platform", "device", "git_revision")}
            machine["torch"] = origin["packages"]["torch"]
            if machine not in result["machines"]:
                result["machines"].append(machine)
    if not result["points"]:
        sys.exit(f"{runs} contains no run of {study}; start them with -m +sweep={study}")
    return result


def finished(runs: Json) -> Json:
    """Return the finished runs of a point by seed."""
    return {seed: run for seed, run in runs.items() if "loss" in run}


def spread(values: list[float], digits: int) -> str:
    """Format the mean over seeds with its 95% confidence interval."""
    if not values:
        return ""
    mean, low, high = compute_mean_interval(values)
    interval = f" ({low:.{digits}f} to {high:.{digits}f})" if len(values) > 1 else ""
    return f"{mean:.{digits}f}{interval}"


def load_design(study: str) -> StudyConfig:
    """Return the design in the YAML of a study."""
    register_configs()
    with initialize_config_dir(config_dir=str(find_package_dir("conf")), version_base="1.3"):
        return resolve_config(compose("config", [f"+sweep={study}"])).study


def load_batch_configs(study: str, points: Iterable[str]) -> dict[str, BatchConfig]:
    """Return the batch sizes of each point."""
    register_configs()
    with initialize_config_dir(config_dir=str(find_package_dir("conf")), version_base="1.3"):
        return {
            point: resolve_config(compose("config", [f"+sweep={study}", *point.split(", ")])).batch
            for point in points
        }


def get_metric(run: Json, metric: str) -> float:
    """Return the metric of a finished run."""
    _, _, source = metric.partition(".")
    return float(run["sources"][source] if source else run["bits_per_byte"])


def analyze(result: Json, design: StudyConfig) -> list[Comparison]:
    """Return the comparison of each point with its baseline."""
    points = {}
    for name, runs in result["points"].items():
        point = tuple(tuple(setting.split("=")) for setting in name.split(", "))
        values = {seed: get_metric(run, design.metric) for seed, run in finished(runs).items()}
        diverged = [seed for seed, run in runs.items() if run.get("ended") == "diverge"]
        points[point] = PointRuns(values, frozenset(diverged))
    baseline = {
        key: json.dumps(value) if value is None or isinstance(value, bool) else value
        for key, value in design.baseline.items()
    }
    return analyze_study(points, replace(design, baseline=baseline))


def build_effect_rows(result: Json, design: StudyConfig) -> list[list[str]]:
    """Return the rows of the table of effects, with verdicts."""
    lines = [
        [design.metric, "seeds", "difference", "95% interval", "p (Holm)", "Hedges' g", "verdict"]
    ]
    for comparison in analyze(result, design):
        difference = comparison.difference
        lines.append(
            [
                comparison.label,
                str(difference.num_pairs),
                format_metric(difference.mean, signed=True),
                format_interval(difference.low, difference.high),
                format_p_value(comparison.p_value),
                format_metric(difference.effect_size, signed=True, decimals=1),
                format_verdict(comparison, design),
            ]
        )
    return lines


def compared_with(result: Json) -> str:
    """Return the first value of the last axis."""
    return str(next(iter(result["points"]))).rpartition(", ")[2]


def reference(result: Json, point: str) -> str:
    """Return the reference of a point."""
    others, comma, _ = point.rpartition(", ")
    return f"{others}{comma}{compared_with(result)}"


def compute_source_differences(runs: Json, first: Json, source: str) -> list[float]:
    """Return the difference in held-out bits per byte of a source to the reference, by seed."""
    shared = [seed for seed in runs if seed in first]
    return [runs[seed]["sources"][source] - first[seed]["sources"][source] for seed in shared]


def in_markdown(lines: list[list[str]]) -> str:
    """Format a Markdown table."""
    header, *rows = lines
    ruled = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in ruled) + "\n"


def render(result: Json) -> str:
    """Return the tables in Markdown: effects with verdicts, and means with 95% intervals."""
    points = {point: finished(runs) for point, runs in result["points"].items()}
    all_runs = [run for runs in points.values() for run in runs.values()]
    has_spikes = all("spikes" in run for run in all_runs)
    header = [
        "",
        "finished",
        "training loss, last tenth",
        "held-out bits per byte",
        "variance of the loss, last quarter",
        *(["spikes of the gradient norm"] if has_spikes else []),
    ]
    lines = [header]
    for point, done in points.items():
        columns = [[run[key] for run in done.values()] for key in ("loss", "bits_per_byte")]
        variances = [run["loss_variance"] for run in done.values()]
        count = f"{len(done)} of {len(result['points'][point])}"
        cells = [point, count, *(spread(c, 4) for c in columns), spread(variances, 5)]
        spikes = [spread([run["spikes"] for run in done.values()], 1)] if has_spikes else []
        lines.append([*cells, *spikes])
    table = (
        in_markdown(build_effect_rows(result, load_design(result["study"])))
        + "\n"
        + in_markdown(lines)
    )
    if all("sources" in run for run in all_runs):
        table += "\n" + in_markdown(by_source(result, points))
    return table


def by_source(result: Json, points: dict[str, Json]) -> list[list[str]]:
    """Return the rows of the table of held-out bits per byte by source."""
    sources = list(next(run for runs in points.values() for run in runs.values())["sources"])
    first = compared_with(result)
    lines = [
        [
            "held-out bits per byte",
            *(f"{s}{less}" for s in sources for less in ("", f", less {first}")),
        ]
    ]
    for point, done in points.items():
        other, cells = reference(result, point), []
        for source in sources:
            cells.append(spread([run["sources"][source] for run in done.values()], 4))
            less = compute_source_differences(done, points[other], source)
            cells.append("" if point == other else spread(less, 4))
        lines.append([point, *cells])
    return lines


def band(axes: Axes, curves: list[NDArray[np.float64]], label: str, colour: str) -> None:
    """Plot the mean of curves [2, points] with equal positions as a line, their range as a band."""
    if not curves:
        return
    tokens, values = curves[0][0], np.array([curve[1] for curve in curves])
    axes.plot(tokens, values.mean(0), color=colour, label=label, linewidth=1.5)
    axes.fill_between(tokens, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0)


def over_tokens(curve: list[list[float]], batch: BatchConfig) -> NDArray[np.float64]:
    """Return millions of tokens and values [2, points] of a curve over steps."""
    return np.array([[count_tokens(int(step), batch) / 1e6, value] for step, value in curve]).T


def draw(result: Json) -> Figure:
    """Plot the smoothed loss, and the difference in held-out bits per byte to the reference."""
    figure = Figure(figsize=(7.5, 7), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    batches = load_batch_configs(result["study"], result["points"])
    for colour, (point, runs) in zip(COLOURS, result["points"].items(), strict=False):
        done, other = finished(runs), reference(result, point)
        losses = [run["loss_curve"][BLOCKS // 10 :] for run in done.values()]
        band(upper, [over_tokens(curve, batches[point]) for curve in losses], point, colour)
        first = finished(result["points"][other])
        differences = []
        for seed in (seed for seed in done if seed in first):
            tokens, bits = over_tokens(done[seed]["bits_curve"], batches[point])
            zero = np.interp(tokens, *over_tokens(first[seed]["bits_curve"], batches[other]))
            differences.append(np.array([tokens, bits - zero]))
        band(lower, differences, point, colour)
    seeds = max(len(finished(runs)) for runs in result["points"].values())
    upper.set_title(f"Training loss, mean and range over {seeds} seeds", loc="left", fontsize=11)
    upper.set_ylabel(f"nats per token, means of 1/{BLOCKS} of the run")
    upper.legend()
    title = f"Held-out text: bits per byte less those of {compared_with(result)}"
    lower.set_title(title, loc="left", fontsize=11)
    lower.set_ylabel("bits per byte, seed by seed")
    lower.set_xlabel("millions of tokens")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study")
    parser.add_argument("--runs", type=Path, help="directory of the runs; default: read STUDY.json")
    parser.add_argument("--output", type=Path, default=HERE)
    arguments = parser.parse_args()
    recorded = arguments.output / f"{arguments.study}.json"
    if arguments.runs is not None:
        result = collect(arguments.study, arguments.runs)
        recorded.write_text(json.dumps(result) + "\n")
    result = json.loads(recorded.read_text())
    table = render(result)
    recorded.with_suffix(".md").write_text(table)
    with rc_context(STYLE):
        draw(result).savefig(recorded.with_suffix(".svg"), metadata={"Date": None})
    print(table, end="")


if __name__ == "__main__":
    main()
