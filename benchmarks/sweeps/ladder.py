"""Fit the runs of sweeps/ladder.yaml, and compare the fit with larger runs.

Usage: PYTHONPATH=. python benchmarks/sweeps/ladder.py --runs runs --max-flops 7e12
       (writes ladder.json, ladder.md and figures)
       PYTHONPATH=. python benchmarks/sweeps/ladder.py    (page and figures from the JSON)

Runs above --max-flops are not fitted. Some of them have a prediction of `hlat fit predict=`, which
was registered before they started.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context

from benchmarks.sweeps.record_study import list_machines
from hlat.report.scaling_figures import build_compute_figure, build_fit_figure, build_grid
from hlat.study.registered_prediction import compare_prediction
from hlat.study.run_record import load_run_record
from hlat.study.scaling_analysis import ScalingAnalysis, analyze_points
from hlat.study.scaling_fit import FitSettings, fit_scaling_law
from hlat.study.scaling_points import PointColumns, ScalingPoints
from hlat.study.scaling_runs import load_run_points
from hlat.study.scaling_text import format_analysis

HERE = Path(__file__).resolve().parent
COLUMNS = PointColumns("parameters", None, None, "heldout_bits_per_byte")
NUM_HELD_OUT = 20
COVERAGE_SAMPLES = 200
TABLE = ("names", "parameters", "tokens", "flops", "losses", "other_parameters")
"""Recorded fields of `ScalingPoints`."""


def collect(root: Path, max_flops: float) -> dict[str, Any]:
    """Return the points of all finished runs, and the registered predictions with their runs."""
    points, notes = load_run_points([root], COLUMNS)
    order = np.lexsort([points.losses, points.tokens, points.parameters]).tolist()
    records = {name: load_run_record(Path(name)) for name in points.names}
    table = {key: [getattr(points, key)[i] for i in order] for key in TABLE}
    table["names"] = [Path(name).name for name in table["names"]]
    return {
        "max_flops": max_flops,
        "machines": list_machines([*records.values()]),
        "notes": notes,
        "points": {key: np.asarray(values).tolist() for key, values in table.items()},
        "registered": {
            Path(name).name: {
                "prediction": drop_path(record.prediction),
                "start": record.start_time,
                "rows": comparison.rows,
                "problems": comparison.problems,
            }
            for name, record in records.items()
            if (comparison := compare_prediction(record)) is not None
        },
    }


def drop_path(prediction: dict[str, Any]) -> dict[str, Any]:
    """Return a prediction without the directory of its points."""
    inputs = {key: value for key, value in prediction["inputs"].items() if key != "source"}
    return prediction | {"inputs": inputs}


def build_points(table: dict[str, Any]) -> ScalingPoints:
    """Return the recorded points."""
    arrays: dict[str, Any] = {key: np.array(table[key]) for key in TABLE if key != "names"}
    return ScalingPoints(
        source="benchmarks/sweeps/ladder.json",
        metric=COLUMNS.metric,
        names=table["names"],
        groups=table["names"],
        other_name="parameters_without_embedding",
        **arrays,
    )


def count_covered(points: ScalingPoints, max_flops: float) -> int:
    """Return how many of 20 random runs are within the interval of a fit without their models.

    A fit lacks all runs of the size and length of the held-out one.
    """
    fitted = points.select(points.flops <= max_flops)
    chosen = np.random.default_rng(0).choice(len(fitted), NUM_HELD_OUT, replace=False)
    count = 0
    for i in chosen.tolist():
        is_equal = np.all(fitted.inputs == fitted.inputs[:, i : i + 1], axis=0)
        fit = fit_scaling_law(fitted.select(~is_equal), FitSettings(num_samples=COVERAGE_SAMPLES))
        prediction = fit.predict(*fitted.inputs[:, i].tolist())
        count += prediction.run.contains(float(fitted.losses[i]))
    return count


def format_page(recorded: dict[str, Any], analysis: ScalingAnalysis, figures: list[Any]) -> str:
    """Return the fit, the registered predictions and the figures in Markdown."""
    lines = [
        "# ladder: How does the held-out loss depend on parameters and tokens?",
        f"{len(recorded['points']['names'])} runs. Design: [ladder.yaml](../../sweeps/ladder.yaml)."
        " Written by `ladder.py`.",
        f"{recorded['covered']} of {NUM_HELD_OUT} random fitted runs are within the 95% interval "
        "of a fit that lacks all runs of their size and length.",
    ]
    for figure in figures:
        lines += [f"![{figure.alt_text}](ladder_{figure.name}.svg)", figure.caption]
    for name, one in recorded["registered"].items():
        lines += [f"Registered prediction of `{name}`:"]
        lines += ["\n".join([f"* {key}: {value}" for key, value in one["rows"]])]
        lines += [f"Not valid: {problem}" for problem in one["problems"]]
    text = "\n".join(format_analysis(analysis))
    return "\n\n".join([*lines, f"Output of `hlat fit`:\n\n```text\n{text}\n```"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, help="directory of the runs; none: use the JSON")
    parser.add_argument("--max-flops", type=float, help="largest compute of the fitted runs")
    arguments = parser.parse_args()
    file = HERE / "ladder.json"
    if arguments.runs is not None:
        recorded = collect(arguments.runs, arguments.max_flops)
        points = build_points(recorded["points"])
        recorded["covered"] = count_covered(points, arguments.max_flops)
        file.write_text(json.dumps(recorded, indent=1) + "\n")
    recorded = json.loads(file.read_text())
    points, max_flops = build_points(recorded["points"]), recorded["max_flops"]
    budgets = [8 * float(points.flops[points.flops <= max_flops].max())]
    analysis = analyze_points(points, FitSettings(), budgets, recorded["notes"], max_flops)
    figures = [build_fit_figure(analysis)]
    if (law := analysis.compute_law) is not None:
        figures.append(build_compute_figure(analysis, law, build_grid(analysis, law)))
    for figure in figures:
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "hlat"}):
            figure.draw().savefig(HERE / f"ladder_{figure.name}.svg", metadata={"Date": None})
    file.with_suffix(".md").write_text(format_page(recorded, analysis, figures))


if __name__ == "__main__":
    main()
