"""Memory of the fullest device and time of a step, each as one bar cut into its parts."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hlat.config.run import Config
from hlat.planning.forecast import Forecast
from hlat.reporting.figures import INK, LIGHT, MUTED, SERIES, STYLE, alone, element
from hlat.reporting.plan import MEMORY_LABELS, TIME_LABELS


def write(file: Path, config: Config, plan: Forecast) -> None:
    """Draw the figure into an SVG or PNG file.

    Raises:
        OSError: The file cannot be written.
    """
    vector = file.suffix == ".svg"
    colours = {colour: colour for colour in LIGHT} if vector else LIGHT
    style = {key: colours.get(value, value) for key, value in STYLE.items()}
    memory = {MEMORY_LABELS[name]: size / 2**30 for name, size in asdict(plan.memory).items()}
    bars = [("memory of the fullest device, GiB", memory)]
    if plan.throughput is not None:
        step = asdict(plan.throughput.step)
        bars.append(
            ("time of a step, s", {TIME_LABELS[n]: s for n, s in step.items() if n in TIME_LABELS})
        )
    with matplotlib.rc_context({**style, "svg.hashsalt": "plan"}):
        rows = [sum(size > 0 for size in parts.values()) for _, parts in bars]
        figure = Figure(figsize=(6.4, 1.4 + 0.27 * sum(rows)), layout="constrained")
        panels = figure.subplots(len(bars), 1, height_ratios=rows, squeeze=False)[:, 0]
        for axes, (title, parts), colour in zip(panels, bars, SERIES, strict=False):
            waterfall(axes, title, parts, colours[colour], colours[INK])
        have = plan.device_bytes / 2**30
        mark(panels[0], have, f"the device has {have:,.1f}", colours)
        if vector:
            file.write_text(alone(element(figure, _describe(config, plan))))
        else:
            figure.savefig(file, dpi=160, facecolor="white")


def waterfall(axes: Axes, title: str, parts: Mapping[str, float], colour: str, ink: str) -> None:
    """A row for each part, which begins where the one before ended."""
    shown = {label: size for label, size in parts.items() if size > 0}
    total = sum(shown.values())
    begin = 0.0
    for place, size in enumerate(shown.values()):
        axes.barh(place, size, left=begin, color=colour, height=0.7)
        begin += size
        axes.text(begin + total / 100, place, f"{size:.3g}", va="center", fontsize=8)
    axes.set_yticks(range(len(shown)), list(shown))
    axes.invert_yaxis()
    axes.set_xlim(0, total * 1.1)
    axes.tick_params(axis="y", length=0, labelcolor=ink)
    axes.grid(axis="y", visible=False)
    axes.set_axisbelow(True)
    axes.set_title(f"{title}: {total:.4g} together", loc="left", fontsize=10)


def mark(axes: Axes, at: float, label: str, colours: Mapping[str, str]) -> None:
    """A line at a value that parts are compared with, if it is near them."""
    right = axes.get_xlim()[1]
    if at > 3 * right:
        axes.set_xlabel(label)
        return
    axes.set_xlim(0, max(right, at * 1.1))
    axes.axvline(at, color=colours[MUTED], linestyle="dashed", linewidth=1)
    across = axes.get_xaxis_transform()
    axes.text(at, 0.92, f"{label} ", transform=across, ha="right", fontsize=8)


def _describe(config: Config, plan: Forecast) -> str:
    fits = "fits" if plan.fits else "does not fit"
    told = (
        f"{config.model.name} on {config.hardware.nodes} of {config.hardware.name}: "
        f"{plan.memory.total / 2**30:.2f} GiB of {plan.device_bytes / 2**30:.2f}, which {fits}"
    )
    if plan.throughput is None:
        return f"{told}."
    return f"{told}; {plan.throughput.step.total:.3g} s a step."
