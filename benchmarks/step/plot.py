"""Draw the recorded result, and nothing that is not in it.

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


def draw_ratios(axes: Axes, rows: list[Json], second: str) -> None:
    """Speed over the reference: median, and a line from the lowest to the highest round."""
    for place, row in enumerate(rows):
        ratio, shade = row[f"tokens_per_{second}_ratio"], colour(row)
        axes.plot([ratio["min"], ratio["max"]], [place, place], color=shade, linewidth=2)
        axes.scatter(ratio["median"], place, color=shade, s=30, zorder=3)
    axes.axvline(1, color=MUTED, linewidth=1)
    axes.set_yticks(range(len(rows)), [row["contestant"] for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)


def draw_memory(axes: Axes, rows: list[Json]) -> None:
    """Peak memory."""
    peaks = [row["peak_bytes"]["max"] / 1e6 for row in rows]
    axes.barh(range(len(rows)), peaks, color=[colour(row) for row in rows], height=0.6)
    for place, peak in enumerate(peaks):
        axes.annotate(
            f"{peak:,.0f}", (peak, place), (4, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(range(len(rows)), [""] * len(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.margins(x=0.2)


def colour(row: Json) -> str:
    """Ours stand out."""
    return OURS if row["contestant"].startswith("ours") else PEER


def draw(rows: list[Json]) -> Figure:
    """A pair of panels for each device, shape and recipe: speed, and memory beside it."""
    groups: dict[tuple[str, str, str], list[Json]] = {}
    for row in rows:
        if "tokens_per_second_ratio" in row:
            groups.setdefault((row["device"], row["shape"], row["recipe"]), []).append(row)
    figure = Figure(figsize=(8, 0.6 + 2.2 * len(groups)), layout="constrained")
    pairs = figure.subplots(len(groups), 2, width_ratios=[3, 2], sharex="col", squeeze=False)
    for (left, right), ((device, shape, recipe), group) in zip(pairs, groups.items(), strict=True):
        draw_ratios(left, group, "cpu_second" if device == "cpu" else "second")
        draw_memory(right, group)
        left.set_title(f"{shape}, {recipe}, on {device}", loc="left", fontsize=11)
    pairs[-1][0].set_xlabel("speed over that of transformers: median and range")
    pairs[-1][1].set_xlabel("peak memory, MB")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", default="svg")
    parser.add_argument("--folder", type=Path, default=HERE, help="of the result")
    arguments = parser.parse_args()
    result = json.loads((arguments.folder / "result.json").read_text())
    metadata = {"Date": None} if arguments.format == "svg" else None
    path = arguments.folder / f"step.{arguments.format}"
    with rc_context(STYLE):
        draw(result["rows"]).savefig(path, dpi=120, metadata=metadata)


if __name__ == "__main__":
    main()
