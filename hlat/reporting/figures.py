"""Figures as SVG that takes its colours from where it is shown, and as PNG on white paper.

One SVG serves light and dark pages, print and phones: it is drawn in placeholder colours, which
become CSS variables. A figure that is opened alone brings the variables along. Small separate
panels, rather than one wide sheet, stay legible on a phone.
"""

import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, TypeVar

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from hlat.reporting.curves import (
    Curve,
    data_wait,
    heldout,
    marks,
    metric,
    most_points,
    scores,
    thin,
)
from hlat.reporting.record import Record
from hlat.reporting.wording import short, whole

PALETTE = """
:root { color-scheme: light dark;
  --paper: #ffffff; --ink: #1c2024; --muted: #5a6470; --grid: #dfe3e8;
  --series-1: #0072b2; --series-2: #c04f00; --series-3: #007a5a; --series-4: #9b4a85;
  --series-5: #806000; --series-6: #1c2024; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14171a; --ink: #e8eaed; --muted: #a3adb8; --grid: #31373d;
  --series-1: #56b4e9; --series-2: #f5843c; --series-3: #2fc79b; --series-4: #dd8fc0;
  --series-5: #e6c229; --series-6: #e8eaed; } }
"""
"""The variables that a page must define: after Okabe and Ito, told apart by all kinds of eyes."""

INK, MUTED, PAPER = "#00000a", "#00000b", "#00000d"
_GRID, _MEAN = "#00000c", "#000006"
SERIES = ["#000001", "#000002", "#000003", "#000004", "#000005"]
_DASHES = ["solid", "dashed", "dashdot", "dotted"]
_VARIABLES = {
    **{colour: f"var(--series-{i})" for i, colour in enumerate([*SERIES, _MEAN], start=1)},
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    PAPER: "var(--paper)",
    _GRID: "var(--grid)",
}
LIGHT = {
    colour: re.findall(rf"{variable[4:-1]}: (#\w+)", PALETTE)[0]
    for colour, variable in _VARIABLES.items()
}
"""What a placeholder is on white paper, for pictures that cannot follow the page."""
SIZE = (4.8, 2.8)
"""Inches of a panel."""

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.3,
    "legend.frameon": False,
}
_FEW_POINTS = 40
_Written = TypeVar("_Written")
_DOTS_PER_INCH = 200


@dataclass(frozen=True)
class Picture:
    """A figure that can be drawn as SVG and as PNG.

    Attributes:
        name: File name without ending.
        description: What it shows, for those who do not see it.
        paint: Draws it; it gets a colour for each placeholder.
    """

    name: str
    description: str
    paint: Callable[[Mapping[str, str]], Figure]

    def svg(self) -> str:
        """Return an SVG element, the same bytes each time, for a page that has `PALETTE`."""
        return self._drawn({colour: colour for colour in LIGHT}, self._element)

    def png(self) -> bytes:
        """Return a PNG file on white paper."""
        return self._drawn(LIGHT, self._pixels)

    def write(self, file: Path) -> None:
        """Write it into a file, SVG or PNG by its ending.

        Raises:
            OSError: The file cannot be written.
        """
        file.write_bytes(alone(self.svg()).encode() if file.suffix == ".svg" else self.png())

    def _drawn(self, colours: Mapping[str, str], write: Callable[[Figure], _Written]) -> _Written:
        style = {key: colours.get(value, value) for key, value in STYLE.items()}
        with matplotlib.rc_context({**style, "svg.hashsalt": self.name}):
            return write(self.paint(colours))

    def _element(self, figure: Figure) -> str:
        return element(figure, self.description)

    def _pixels(self, figure: Figure) -> bytes:
        written = io.BytesIO()
        # The library's version would make other bytes of the same picture
        metadata = {"Software": None, "Description": self.description}
        figure.savefig(
            written, format="png", dpi=_DOTS_PER_INCH, facecolor="white", metadata=metadata
        )
        return written.getvalue()


@dataclass(frozen=True)
class Panel:
    """One figure.

    Attributes:
        name: File name without ending.
        title: What it shows.
        unit: Label of the vertical axis.
        curves: Its lines; those without any value are left out.
        at_least: Values that the vertical axis must reach, so that noise does not look like news.
        smooth: Whether a reader may lay a mean of neighbours over it.
        note: What else a reader must know to trust it.
    """

    name: str
    title: str
    unit: str
    curves: list[Curve]
    at_least: tuple[float, ...] = ()
    smooth: bool = False
    note: str = ""


def panels(record: Record) -> list[Panel]:
    """The figures of a run, without those that would be empty."""
    drawn = [
        Panel("loss", "Training loss", "nats per token", [metric(record, "loss")], smooth=True),
        Panel("grad_norm", "Gradient norm", "l2, before clipping", [metric(record, "grad_norm")]),
        Panel("param_norm", "Parameter norm", "l2, all weights", [metric(record, "param_norm")]),
        Panel("learning_rate", "Learning rate", "", [metric(record, "learning_rate")]),
        Panel("heldout", "Held-out text", "bits per byte", heldout(record)),
        Panel("scores", "Evaluation", "score", scores(record), note=_limits(record)),
        Panel(
            "throughput",
            "Throughput",
            "tokens per second",
            [metric(record, "tokens_per_second")],
            at_least=(0,),
        ),
        Panel(
            "data_wait", "Waiting for data", "% of step time", [data_wait(record)], at_least=(0, 10)
        ),
    ]
    return [panel for panel in drawn if any(map(drawable, panel.curves))]


def describe(panel: Panel) -> str:
    """What a panel shows, for those who do not see it."""
    lines = []
    for curve in filter(drawable, panel.curves):
        values = curve.values[~np.isnan(curve.values)]
        name = f"{curve.label}: " if len(panel.curves) > 1 else ""
        lines.append(
            f"{name}from {short(values[0])} to {short(values[-1])},"
            f" lowest {short(values.min())}, highest {short(values.max())}"
        )
    end = max(curve.tokens.max() for curve in filter(drawable, panel.curves))
    unit = f" ({panel.unit})" if panel.unit else ""
    return f"{panel.title}{unit} over {short(end)} tokens; {'; '.join(lines)}."


def caption(panel: Panel) -> str:
    """What a reader must know to trust a panel: thinning, gaps and errors."""
    notes = [panel.note] if panel.note else []
    rows = max(len(curve.values) for curve in panel.curves)
    most = most_points(len(panel.curves))
    if rows > most:
        notes.append(
            f"{whole(rows)} rows, drawn as the smallest and largest value"
            f" of each of {whole(most // 2)} stretches."
        )
    missing = sum(int(np.isnan(curve.values).sum()) for curve in panel.curves)
    if missing:
        notes.append(f"Not drawn, as missing or not finite: {whole(missing)}.")
    if any(_has_errors(curve) for curve in panel.curves):
        notes.append("Vertical lines at points: one standard error each way.")
    return " ".join(notes)


def legend(record: Record) -> str:
    """What the vertical lines in the figures mean; empty if there are none."""
    notes = []
    if len(marks(record, "resume").steps):
        notes.append("Dashed vertical lines: the run was resumed.")
    if len(phases(record).steps):
        notes.append("Dotted vertical lines: the next phase began.")
    return " ".join(notes)


def picture(panel: Panel, record: Record | None = None) -> Picture:
    """The picture of a panel.

    Args:
        panel: The figure.
        record: The run whose restarts and phases are marked; None: nothing is marked.
    """

    def paint(colours: Mapping[str, str]) -> Figure:
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        most = most_points(len(panel.curves))
        curves = [thin(curve, most) for curve in panel.curves if drawable(curve)]
        lines = [_draw_curve(axes, i, curve, colours) for i, curve in enumerate(curves)]
        if len(panel.curves) > 1:
            names = [curve.label for curve in curves]
            figure.legend(lines, names, loc="outside upper left", ncols=_columns(names), fontsize=9)
        if record is not None:
            _draw_marks(axes, record, colours)
        _label(axes, panel)
        return figure

    return Picture(panel.name, describe(panel), paint)


def element(figure: Figure, description: str) -> str:
    """Make an SVG element of a figure that was drawn in placeholder colours."""
    written = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(written, format="svg", transparent=True, metadata=nothing)
    return _adopt(written.getvalue(), description)


def alone(svg: str) -> str:
    """Make a file of its own from an SVG element."""
    namespaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    style = f"<style>{PALETTE}text {{ font-family: system-ui, sans-serif; }}</style>"
    opening, rest = svg.split(">", 1)
    return f"{opening.replace('<svg', f'<svg {namespaces}', 1)}>{style}{rest}"


def drawable(curve: Curve) -> bool:
    """Whether a curve has any value to show."""
    return bool((~np.isnan(curve.values) & ~np.isnan(curve.tokens)).any())


def _columns(names: list[str]) -> int:
    """Columns of a legend, so that it is no wider than its figure."""
    return max(1, min(4, 60 // (6 + max(map(len, names)))))


def phases(record: Record) -> Curve:
    """Where phases began that a run did not begin with."""
    found = marks(record, "phase")
    return found.at(np.flatnonzero(found.steps > 0))


def look(place: int, label: str) -> tuple[str, str]:
    """Return the placeholder colour and the dashes of a curve."""
    if label == "mean":
        return _MEAN, "solid"
    return SERIES[place % len(SERIES)], _DASHES[place % len(_DASHES)]


def variable(colour: str) -> str:
    """Return the CSS variable that a placeholder colour becomes."""
    return _VARIABLES[colour][len("var(") : -1]


def _draw_curve(axes: Axes, place: int, curve: Curve, colours: Mapping[str, str]) -> Line2D:
    colour, dashes = look(place, curve.label)
    if curve.errors is not None:
        low, high = curve.values - curve.errors, curve.values + curve.errors
        axes.vlines(curve.tokens, low, high, colors=colours[colour], linewidth=1)
    (line,) = axes.plot(
        curve.tokens,
        curve.values,
        color=colours[colour],
        linestyle=dashes,
        linewidth=2.0 if curve.label == "mean" else None,
        marker="o" if len(curve.values) < _FEW_POINTS else None,
        markersize=3,
    )
    return line


def _draw_marks(axes: Axes, record: Record, colours: Mapping[str, str]) -> None:
    for linestyle, found in (("dashed", marks(record, "resume")), ("dotted", phases(record))):
        for tokens in found.tokens:
            axes.axvline(tokens, color=colours[MUTED], linestyle=linestyle, linewidth=0.8, zorder=1)


def _limits(record: Record) -> str:
    """Whether scores are those of a part of their tasks."""
    limits = [row["limit"] for row in record.scores.values() if isinstance(row.get("limit"), int)]
    return f"Some scores are of the first {max(limits)} examples of a task." if limits else ""


def _has_errors(curve: Curve) -> bool:
    return curve.errors is not None and bool(np.isfinite(curve.errors).any())


def _label(axes: Axes, panel: Panel) -> None:
    axes.set_xlabel("tokens")
    axes.set_ylabel(panel.unit)
    for value in panel.at_least:
        bottom, top = axes.get_ylim()
        axes.set_ylim(min(bottom, value), max(top, value))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def _adopt(svg: str, description: str) -> str:
    body = svg[svg.index("<svg") :]
    box = re.search(r'viewBox="[^"]*"', body)
    assert box is not None, "matplotlib writes a viewBox"
    body = body[body.index("</defs>") + len("</defs>") :]
    body = re.sub(r' id="[a-z]+[.a-z0-9]*_\d+"', "", body)
    body = re.sub(r" font-family: [^;]*;", "", body)
    body = re.sub(r"#[0-9a-f]{6}(?=[;\"])", lambda match: _VARIABLES[match[0]], body)
    return f'<svg {box[0]} role="img" aria-label="{escape(description)}">{body}'
