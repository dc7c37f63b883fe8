"""Compare planned and published throughput of all rows, fitted and held out.

Usage: PYTHONPATH=. python benchmarks/planning/compare.py

Writes throughput.json, throughput.svg and the tables of throughput.md. Constants and intervals are
those of fit_devices.py, which does not read held-out rows.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.common import INK, MUTED, STYLE, table, write_between
from benchmarks.planning.fit_devices import PRIORS
from benchmarks.planning.row_planner import (
    FIT,
    DeviceFit,
    compute_throughput,
    load_fit,
    plan_row,
)
from benchmarks.planning.throughput_rows import EXCLUDED, ThroughputRow, load_rows

HERE = Path(__file__).resolve().parent
PAGE = HERE / "throughput.md"
COLOURS = {
    "A100": "#0072b2",
    "H100": "#c04f00",
    "H200": "#007a5a",
    "B200": "#9b4a85",
    "GB": "#806000",
    "trn1": MUTED,
}
"""Colours by the beginning of the device's name."""
MARKERS = {
    "fitted": ("o", "fitted"),
    "calibrated": ("D", "held out, calibrated"),
    "other": ("x", "held out, other"),
}
"""Marker and label by state of a row."""
LABELS = {
    "sustained": "speed of matmuls relative to the best measured one",
    "a100": "the same on A100, relative to other GPUs",
    "h100_500w": "the same on H100 with a limit of 500 W",
    "float8": "the same with float8, relative to bf16",
    "attention": "speed of attention relative to the published one",
    "compiled_passes": "transfers of an activation, compiled",
    "eager_passes": "transfers of an activation, eager",
    "overlap": "overlap of data-parallel collectives",
    "link": "achieved fraction of links, both directions",
    "network": "achieved fraction of the network",
    "tensor_overlap": "overlap of asynchronous tensor parallelism",
}
"""Descriptions of the constants; others are frameworks, relative to torchtitan."""
Result = dict[str, Any]


def build_result(row: ThroughputRow, fit: DeviceFit) -> Result:
    """Return the planned and the published throughput of a row."""
    step = plan_row(row, fit.constants)
    planned = compute_throughput(row, step.total)
    low, high = fit.get_interval(row)
    return {
        "id": row.row_id,
        "framework": row.framework,
        "source": row.source,
        "model": row.model,
        "device": row.device,
        "devices": row.num_devices,
        "layout": row.layout,
        "precision": row.precision,
        "fitted": row.is_fitted,
        "calibrated": fit.is_calibrated(row),
        "published": row.published,
        "planned": planned,
        "error": planned / row.published - 1,
        "interval": [planned / high, planned / low],
        "parts": {name: round(value, 5) for name, value in vars(step).items() if value},
    }


def weigh_results(results: Sequence[Result]) -> list[float]:
    """Return weights with the same sum for each source."""
    counts = Counter(result["source"] for result in results)
    return [1 / (len(counts) * counts[result["source"]]) for result in results]


def compute_quantile(values: Sequence[float], weights: Sequence[float], level: float) -> float:
    """Return the smallest value with at least this share of the weights at or below it."""
    total, reached = sum(weights), 0.0
    for value, weight in sorted(zip(values, weights, strict=True)):
        reached += weight
        if reached >= level * total - 1e-12:
            return value
    return math.nan


def summarize(results: Sequence[Result]) -> Result:
    """Return errors and coverage of the interval, weighted by source."""
    weights = weigh_results(results)
    errors = [abs(result["error"]) for result in results]
    is_covered = [
        result["interval"][0] <= result["published"] <= result["interval"][1] for result in results
    ]
    signed = [result["error"] for result in results]
    return {
        "rows": len(results),
        "sources": len({result["source"] for result in results}),
        "median_error": compute_quantile(errors, weights, 0.5),
        "p90_error": compute_quantile(errors, weights, 0.9),
        "median_signed_error": compute_quantile(signed, weights, 0.5),
        "largest_error": max(errors),
        "coverage": sum(w for w, covered in zip(weights, is_covered, strict=True) if covered),
    }


def select_groups(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return the rows of each line of the summary, by its label."""
    held_out = [result for result in results if not result["fitted"]]
    calibrated = [result for result in held_out if result["calibrated"]]
    groups = {
        "fitted rows": [result for result in results if result["fitted"]],
        "held out, calibrated": calibrated,
        "held out, not calibrated": [one for one in held_out if not one["calibrated"]],
    }
    for one in held_out:
        groups.setdefault(f"{one['device']}, {one['framework']}", []).append(one)
    return groups


def render_summary(results: Sequence[Result]) -> str:
    """Return the table of errors by group."""
    header = [
        *("rows", "number", "sources", "median error", "median absolute error"),
        *("90th percentile", "largest", "in the interval"),
    ]
    lines = []
    for name, group in select_groups(results).items():
        found = summarize(group)
        percents = [found["median_error"], found["p90_error"], found["largest_error"]]
        lines.append(
            [
                name,
                str(found["rows"]),
                str(found["sources"]),
                f"{found['median_signed_error']:+.1%}",
                *(f"{value:.1%}" for value in percents),
                f"{found['coverage']:.0%}",
            ]
        )
    return table(header, lines)


def render_rows(results: Sequence[Result]) -> str:
    """Return the table of all rows by device and framework."""
    header = [
        *("row", "device", "framework", "model", "devices", "layout", "precision"),
        *("published", "planned", "80% interval", "error"),
    ]
    order = sorted(results, key=lambda one: (one["device"], one["framework"], one["id"]))
    lines = [
        [
            f"{one['id']}{' fitted' if one['fitted'] else ''}",
            one["device"],
            one["framework"],
            one["model"],
            str(one["devices"]),
            one["layout"],
            one["precision"],
            f"{one['published']:,.4g}" if one["published"] < 1e4 else f"{one['published']:,.0f}",
            f"{one['planned']:,.4g}" if one["planned"] < 1e4 else f"{one['planned']:,.0f}",
            f"{one['interval'][0]:.4g} to {one['interval'][1]:.4g}"
            + ("" if one["calibrated"] else ", not calibrated"),
            f"{one['error']:+.1%}",
        ]
        for one in order
    ]
    return table(header, lines)


def render_constants() -> str:
    """Return the table of fitted constants with their priors."""
    found = json.loads(FIT.read_text())
    values = found["constants"] | found["constants"]["factors"]
    lines = []
    for name, prior in PRIORS.items():
        std = found["standard_deviations"][name]
        spreads = [f"{s:.2f}" if prior.is_linear else f"{s:.0%}" for s in (prior.std, std)]
        text = LABELS.get(name, f"time of computation of {name}")
        prior_text, fitted = (
            f"{value:.3g} ± {spread}"
            for value, spread in zip((prior.mean, values[name]), spreads, strict=True)
        )
        lines.append([text, prior_text, fitted])
    return table(["constant", "prior", "fitted"], lines)


def get_style(marker: str, colour: str) -> dict[str, Any]:
    """Return the style of a marker: crosses, and filled or open symbols."""
    style = {"s": 24, "marker": marker}
    if marker == "x":
        return style | {"color": colour}
    return style | {"facecolors": "none" if marker == "D" else colour, "edgecolors": colour}


def draw(results: Sequence[Result]) -> Figure:
    """Return a figure of the planned throughput relative to the published one."""
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    for one in results:
        colour = next(value for name, value in COLOURS.items() if one["device"].startswith(name))
        state = "fitted" if one["fitted"] else "calibrated" if one["calibrated"] else "other"
        axes.scatter(one["published"], 1 + one["error"], **get_style(MARKERS[state][0], colour))
    for name, colour in COLOURS.items():
        axes.scatter([], [], s=24, color=colour, label=name)
    for marker, label in MARKERS.values():
        axes.scatter([], [], label=label, **get_style(marker, INK))
    axes.axhline(1, color=INK, linewidth=0.8)
    for ratio in (0.8, 1.25):
        axes.axhline(ratio, color=MUTED, linewidth=0.8, linestyle="dashed")
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    axes.set_yticks([0.5, 0.8, 1, 1.25, 2, 4], ["0.5", "0.8", "1", "1.25", "2", "4"])
    axes.set_xlabel("published tokens per second and device")
    axes.set_ylabel("planned / published")
    figure.legend(loc="outside right upper", fontsize=9)
    return figure


def main() -> None:
    import matplotlib

    fit = load_fit()
    results = [build_result(row, fit) for row in load_rows()]
    summary = {name: summarize(group) for name, group in select_groups(results).items()}
    output = {"summary": summary, "excluded": EXCLUDED, "rows": results}
    (HERE / "throughput.json").write_text(json.dumps(output, indent=1) + "\n")
    write_between(PAGE, "summary", render_summary(results))
    write_between(PAGE, "constants", render_constants())
    write_between(PAGE, "rows", render_rows(results))
    with matplotlib.rc_context(STYLE | {"axes.grid.axis": "both", "axes.spines.left": True}):
        draw(results).savefig(HERE / "throughput.svg", metadata={"Date": None})
    print(render_summary(results))


if __name__ == "__main__":
    main()
