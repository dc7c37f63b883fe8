"""Plot the recorded result.

Usage: python benchmarks/step/plot.py [--format svg]
"""

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.common import MUTED, OURS, PEER, STYLE

HERE = Path(__file__).resolve().parent
Json = dict[str, Any]
LIMIT = "limit"
"""Start of the names of contestants that do not train."""


def plot_ratios(axes: Axes, rows: list[Json], second: str) -> None:
    """Plot the median and the range of the speed relative to the reference."""
    for y, row in enumerate(rows):
        ratio, shade = row[f"tokens_per_{second}_ratio"], colour(row)
        axes.plot([ratio["min"], ratio["max"]], [y, y], color=shade, linewidth=2)
        axes.scatter(ratio["median"], y, color=shade, s=30, zorder=3)
    axes.axvline(1, color=MUTED, linewidth=1)
    axes.set_yticks(range(len(rows)), [row["contestant"] for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)


def plot_memory(axes: Axes, rows: list[Json]) -> None:
    """Plot the peak memory."""
    peaks = [row["peak_bytes"]["max"] / 1e6 for row in rows]
    axes.barh(range(len(rows)), peaks, color=[colour(row) for row in rows], height=0.6)
    for y, peak in enumerate(peaks):
        axes.annotate(f"{peak:,.0f}", (peak, y), (4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(rows)), [""] * len(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.margins(x=0.2)


def colour(row: Json) -> str:
    """Return the colour of a contestant."""
    return OURS if row["contestant"].startswith("ours") else PEER


def plot(rows: list[Json]) -> Figure:
    """Plot speed and memory of each device, shape and recipe."""
    groups: dict[tuple[str, str, str], list[Json]] = {}
    for row in rows:
        if "tokens_per_second_ratio" in row and not row["contestant"].startswith(LIMIT):
            groups.setdefault((row["device"], row["shape"], row["recipe"]), []).append(row)
    figure = Figure(figsize=(8, 0.6 + 2.2 * len(groups)), layout="constrained")
    pairs = figure.subplots(len(groups), 2, width_ratios=[3, 2], sharex="col", squeeze=False)
    for (left, right), ((device, shape, recipe), group) in zip(pairs, groups.items(), strict=True):
        plot_ratios(left, group, "cpu_second" if device == "cpu" else "second")
        plot_memory(right, group)
        left.set_title(f"{shape}, {recipe}, on {device}", loc="left", fontsize=11)
    pairs[-1][0].set_xlabel("speed over that of transformers: median and range")
    pairs[-1][1].set_xlabel("peak memory, MB")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", default="svg")
    parser.add_argument("--folder", type=Path, default=HERE, help="directory of the result")
    arguments = parser.parse_args()
    result = json.loads((arguments.folder / "result.json").read_text())
    metadata = {"Date": None} if arguments.format == "svg" else None
    path = arguments.folder / f"step.{arguments.format}"
    with rc_context(STYLE):
        plot(result["rows"]).savefig(path, dpi=120, metadata=metadata)


if __name__ == "__main__":
    main()
