"""Plot the recorded results.

Usage: python benchmarks/data/plot.py [--format svg]
"""

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.common import OURS, PEER, STYLE

HERE = Path(__file__).resolve().parent
ENCODER_COLOUR = "#e3e7ec"
SHADES = ["#56b4e9", "#0072b2", "#00456b"]
NEMO_HOURS = 154
"""Hours that NeMo needs to tokenize 2 T tokens before training (HLAT paper, section III-B)."""
TITLES = {"bytes": "byte-level BPE", "pieces": "SentencePiece BPE"}


def format_short(value: float) -> str:
    """Format a number with three digits and k or M."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def colour(name: str) -> str:
    """Return the colour of a contestant: ours, encoder or peer."""
    if name.startswith("ours"):
        return OURS
    return ENCODER_COLOUR if name.endswith("alone") else PEER


def plot_bars(axes: Axes, names: list[str], values: list[float], labels: list[str]) -> None:
    """Plot horizontal bars with labels on a logarithmic axis, the first at the top."""
    positions = range(len(names))
    axes.barh(positions, values, color=[colour(name) for name in names], height=0.7)
    for y, value, label in zip(positions, values, labels, strict=True):
        axes.annotate(
            label, (value, y), (4, 0), textcoords="offset points", va="center", fontsize=9
        )
    axes.set_yticks(positions, names)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.12)


def plot_throughput(result: dict[str, Any]) -> Figure:
    """Plot tokens per CPU-second without workers, with a panel for each tokenizer."""
    rows = [
        row
        for row in result["rows"]
        if row["workers"] == 0 and row["corpus"] == "short" and "failure" not in row
    ]
    panels = {name: [row for row in rows if row["tokenizer"] == name] for name in TITLES}
    counts = [len(panel) for panel in panels.values()]
    figure = Figure(figsize=(7.5, 1.6 + 0.3 * sum(counts)), layout="constrained")
    all_axes = figure.subplots(2, 1, sharex=True, height_ratios=counts)
    for axes, (name, panel) in zip(all_axes, panels.items(), strict=True):
        panel.sort(key=lambda row: -row["tokens_per_cpu_second"]["median"])
        rates = [row["tokens_per_cpu_second"]["median"] for row in panel]
        labels = [format_short(rate) for rate in rates]
        plot_bars(axes, [row["contestant"] for row in panel], rates, labels)
        axes.set_title(f"Packed tokens per CPU-second, {TITLES[name]}", loc="left", fontsize=11)
    all_axes[-1].set_xlabel("tokens per CPU-second, one process, median (logarithmic)")
    return figure


def plot_resume(result: dict[str, Any]) -> Figure:
    """Plot the restart time by number of documents; markers of inexact restarts are hollow."""
    rows = [row for row in result["rows"] if "points" in row]
    figure = Figure(figsize=(7.5, 1.4 + 0.34 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for y, row in enumerate(rows):
        points = [point for point in row["points"] if point["corpus"] == "lines"]
        for shade, point in zip(SHADES, points, strict=False):
            face = shade if point["exact"] else "white"
            seconds = point["seconds"]["median"]
            label = f"after {point['documents']:,} documents" if y == 0 else None
            style: Any = {"facecolor": face, "edgecolor": shade, "linewidth": 1.5, "zorder": 3}
            axes.scatter(seconds, y, s=60, label=label, **style)
        last = max(point["seconds"]["median"] for point in points)
        note = f"{last:.2g} s" + ("" if all(p["exact"] for p in points) else ", other data")
        axes.annotate(note, (last, y), (8, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(rows)), [row["contestant"] for row in rows])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.2)
    axes.set_title("Restart: seconds until the first batch", loc="left", fontsize=11)
    axes.set_xlabel("seconds, imports excluded, median (logarithmic); hollow: other data followed")
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.16), ncols=3)
    return figure


def plot_wait(result: dict[str, Any]) -> Figure:
    """Plot the time before the first step."""
    names = ["NeMo: tokenise 2 T tokens first (HLAT paper)"]
    values = [NEMO_HOURS * 3600.0]
    labels = [f"{NEMO_HOURS} h"]
    for encoder, name in (("reference", "ours"), ("fast", "ours, fast encoder")):
        largest = result[encoder]["rows"][-1]
        if "failure" not in largest:
            names.append(f"{name}: first batch of {largest['rows']:,} documents")
            values.append(largest["seconds"]["median"])
            labels.append(f"{values[-1]:.2g} s")
    figure = Figure(figsize=(7.5, 1.1 + 0.36 * len(names)), layout="constrained")
    axes = figure.subplots()
    plot_bars(axes, names, values, labels)
    axes.set_title("Before the first step", loc="left", fontsize=11)
    axes.set_xlabel("seconds (logarithmic)")
    return figure


FIGURES = {
    "throughput": ("result.json", plot_throughput),
    "resume": ("resume.json", plot_resume),
    "wait": ("scale.json", plot_wait),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", default="svg")
    parser.add_argument("--results", type=Path, default=HERE)
    arguments = parser.parse_args()
    for name, (file, plot) in FIGURES.items():
        if (arguments.results / file).exists():
            result = json.loads((arguments.results / file).read_text())
            with rc_context(STYLE):
                metadata = {"Date": None} if arguments.format == "svg" else None
                path = arguments.results / f"{name}.{arguments.format}"
                plot(result).savefig(path, dpi=120, metadata=metadata)


if __name__ == "__main__":
    main()
