"""Figures as SVG with the colours of the page, and as PNG on a white background.

A figure is drawn in placeholder colours, which become CSS variables, so that one SVG follows the
light or dark scheme of its page. A standalone SVG file contains the variables. Each panel is a
separate figure, which stays legible on a phone.
"""

import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, TypeVar

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from hlat.report.metric_curves import (
    Curve,
    build_data_wait_curve,
    build_heldout_curves,
    build_metric_curve,
    build_score_curves,
    compute_max_points,
    downsample_min_max,
    locate_events,
)
from hlat.report.run_record import RunRecord
from hlat.report.text_format import format_count, format_short

PALETTE_CSS = """
:root { color-scheme: light dark;
  --paper: #ffffff; --ink: #1c2024; --muted: #5a6470; --grid: #dfe3e8;
  --series-1: #0072b2; --series-2: #c04f00; --series-3: #007a5a; --series-4: #9b4a85;
  --series-5: #806000; --series-6: #1c2024; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14171a; --ink: #e8eaed; --muted: #a3adb8; --grid: #31373d;
  --series-1: #56b4e9; --series-2: #f5843c; --series-3: #2fc79b; --series-4: #dd8fc0;
  --series-5: #e6c229; --series-6: #e8eaed; } }
"""
"""CSS variables of a page, after the colour-blind safe palette of Okabe and Ito."""

INK, MUTED, PAPER = "#00000a", "#00000b", "#00000d"
_GRID, _MEAN = "#00000c", "#000006"
SERIES = ["#000001", "#000002", "#000003", "#000004", "#000005"]
_LINE_STYLES = ["solid", "dashed", "dashdot", "dotted"]
_CSS_VARIABLES = {
    **{colour: f"var(--series-{i})" for i, colour in enumerate([*SERIES, _MEAN], start=1)},
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    PAPER: "var(--paper)",
    _GRID: "var(--grid)",
}
LIGHT_COLOURS = {
    colour: re.findall(rf"{variable[4:-1]}: (#\w+)", PALETTE_CSS)[0]
    for colour, variable in _CSS_VARIABLES.items()
}
"""Colours of the light scheme by placeholder, for figures that cannot follow the page."""
FIGURE_SIZE = (4.8, 2.8)
"""Width and height of a panel in inches."""

MATPLOTLIB_STYLE: dict[Any, Any] = {
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
_MAX_POINTS_WITH_MARKERS = 40
_Rendered = TypeVar("_Rendered")
_DPI = 200


@dataclass(frozen=True)
class ReportFigure:
    """A figure that can be rendered as SVG and PNG.

    Attributes:
        name: File name without extension.
        alt_text: Alternative text for screen readers.
        draw: Function that draws the figure with a colour for each placeholder.
    """

    name: str
    alt_text: str
    draw: Callable[[Mapping[str, str]], Figure]

    def render_svg(self) -> str:
        """Return a reproducible SVG element for a page that contains `PALETTE_CSS`."""
        to_svg = partial(_render_svg_element, alt_text=self.alt_text)
        return self._render({colour: colour for colour in LIGHT_COLOURS}, to_svg)

    def render_png(self) -> bytes:
        """Return a PNG file with a white background."""
        return self._render(LIGHT_COLOURS, self._to_png)

    def save(self, file: Path) -> None:
        """Save the figure as SVG or PNG, depending on the extension.

        Raises:
            OSError: The file cannot be written.
        """
        is_svg = file.suffix == ".svg"
        content = build_standalone_svg(self.render_svg()).encode() if is_svg else self.render_png()
        file.write_bytes(content)

    def _render(
        self, colours: Mapping[str, str], serialize: Callable[[Figure], _Rendered]
    ) -> _Rendered:
        style = {key: colours.get(value, value) for key, value in MATPLOTLIB_STYLE.items()}
        with matplotlib.rc_context({**style, "svg.hashsalt": self.name}):
            return serialize(self.draw(colours))

    def _to_png(self, figure: Figure) -> bytes:
        buffer = io.BytesIO()
        # Without Software, the bytes do not depend on the version of matplotlib
        metadata = {"Software": None, "Description": self.alt_text}
        figure.savefig(buffer, format="png", dpi=_DPI, facecolor="white", metadata=metadata)
        return buffer.getvalue()


@dataclass(frozen=True)
class Panel:
    """A figure of curves over tokens.

    Attributes:
        name: File name without extension.
        title: Title.
        unit: Label of the vertical axis.
        curves: Curves; those without values are not drawn.
        axis_includes: Values that the vertical axis includes, so that noise does not fill it.
        can_smooth: Allow the reader to smooth the curves.
        note: Remark in the caption.
    """

    name: str
    title: str
    unit: str
    curves: list[Curve]
    axis_includes: tuple[float, ...] = ()
    can_smooth: bool = False
    note: str = ""


METRIC_PANELS = (
    ("loss", "Training loss", "nats per token"),
    ("grad_norm", "Gradient norm", "l2, before clipping"),
    ("param_norm", "Parameter norm", "l2, all weights"),
    ("learning_rate", "Learning rate", ""),
)
"""Column of metrics.jsonl, title and unit."""


def build_run_panels(record: RunRecord) -> list[Panel]:
    """Return the panels of a run that have values."""
    throughput, wait = (
        [build_metric_curve(record, "tokens_per_second")],
        [build_data_wait_curve(record)],
    )
    panels = [
        Panel(key, title, unit, [build_metric_curve(record, key)], can_smooth=key == "loss")
        for key, title, unit in METRIC_PANELS
    ]
    panels += [
        Panel("heldout", "Held-out text", "bits per byte", build_heldout_curves(record)),
        Panel(
            "scores",
            "Evaluation",
            "score",
            build_score_curves(record),
            note=_format_score_limit(record),
        ),
        Panel("throughput", "Throughput", "tokens per second", throughput, axis_includes=(0,)),
        Panel("data_wait", "Waiting for data", "% of step time", wait, axis_includes=(0, 10)),
    ]
    return [panel for panel in panels if any(map(has_values, panel.curves))]


def format_alt_text(panel: Panel) -> str:
    """Return the alternative text of a panel: first, last, smallest and largest values."""
    curves = [curve for curve in panel.curves if has_values(curve)]
    lines = []
    for curve in curves:
        values = curve.values[~np.isnan(curve.values)]
        name = f"{curve.label}: " if len(panel.curves) > 1 else ""
        lines.append(
            f"{name}from {format_short(values[0])} to {format_short(values[-1])},"
            f" lowest {format_short(values.min())}, highest {format_short(values.max())}"
        )
    end = format_short(max(curve.tokens.max() for curve in curves))
    unit = f" ({panel.unit})" if panel.unit else ""
    return f"{panel.title}{unit} over {end} tokens; {'; '.join(lines)}."


def format_caption(panel: Panel) -> str:
    """Return the caption of a panel: note, downsampling, missing values and error bars."""
    notes = [panel.note] if panel.note else []
    rows = max(len(curve.values) for curve in panel.curves)
    max_points = compute_max_points(len(panel.curves))
    if rows > max_points:
        notes.append(
            f"{format_count(rows)} rows, drawn as the smallest and largest value"
            f" of each of {format_count(max_points // 2)} windows."
        )
    missing = sum(int(np.isnan(curve.values).sum()) for curve in panel.curves)
    if missing:
        notes.append(f"Not drawn, as missing or not finite: {format_count(missing)}.")
    errors = [curve.errors for curve in panel.curves if curve.errors is not None]
    if any(np.isfinite(error).any() for error in errors):
        notes.append("Error bars: one standard error in each direction.")
    return " ".join(notes)


def format_mark_legend(record: RunRecord) -> str:
    """Return the meaning of the vertical lines in the panels; empty if there are none."""
    notes = []
    if len(locate_events(record, "resume").steps):
        notes.append("Dashed vertical lines: the run was resumed.")
    if len(locate_phase_starts(record).steps):
        notes.append("Dotted vertical lines: the next phase began.")
    return " ".join(notes)


def build_panel_figure(panel: Panel, record: RunRecord | None = None) -> ReportFigure:
    """Return the figure of a panel.

    Args:
        panel: Panel to draw.
        record: Run with the restarts and phases to mark; None to mark none.
    """

    def draw(colours: Mapping[str, str]) -> Figure:
        figure = Figure(figsize=FIGURE_SIZE, layout="constrained")
        axes = figure.add_subplot()
        max_points = compute_max_points(len(panel.curves))
        curves = [downsample_min_max(c, max_points) for c in panel.curves if has_values(c)]
        lines = [_draw_curve(axes, i, curve, colours) for i, curve in enumerate(curves)]
        if len(panel.curves) > 1:
            labels = [curve.label for curve in curves]
            # Not wider than the figure
            columns = max(1, min(4, 60 // (6 + max(map(len, labels)))))
            figure.legend(lines, labels, loc="outside upper left", ncols=columns, fontsize=9)
        if record is not None:
            _draw_marks(axes, record, colours)
        _label_axes(axes, panel)
        return figure

    return ReportFigure(panel.name, format_alt_text(panel), draw)


def build_standalone_svg(svg: str) -> str:
    """Return an SVG file with the content of an SVG element."""
    namespaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    style = f"<style>{PALETTE_CSS}text {{ font-family: system-ui, sans-serif; }}</style>"
    opening, rest = svg.split(">", 1)
    return f"{opening.replace('<svg', f'<svg {namespaces}', 1)}>{style}{rest}"


def has_values(curve: Curve) -> bool:
    """Return True if a curve has a value to draw."""
    return bool((~np.isnan(curve.values) & ~np.isnan(curve.tokens)).any())


def locate_phase_starts(record: RunRecord) -> Curve:
    """Return the positions at which phases after the first one start."""
    starts = locate_events(record, "phase")
    return starts.select(np.flatnonzero(starts.steps > 0))


def get_line_style(index: int, label: str) -> tuple[str, str]:
    """Return the placeholder colour and the line style of a curve."""
    if label == "mean":
        return _MEAN, "solid"
    return SERIES[index % len(SERIES)], _LINE_STYLES[index % len(_LINE_STYLES)]


def get_css_variable(colour: str) -> str:
    """Return the name of the CSS variable of a placeholder colour."""
    return _CSS_VARIABLES[colour][len("var(") : -1]


def _draw_curve(axes: Axes, index: int, curve: Curve, colours: Mapping[str, str]) -> Line2D:
    colour, style = get_line_style(index, curve.label)
    if curve.errors is not None:
        low, high = curve.values - curve.errors, curve.values + curve.errors
        axes.vlines(curve.tokens, low, high, colors=colours[colour], linewidth=1)
    (line,) = axes.plot(
        curve.tokens,
        curve.values,
        color=colours[colour],
        linestyle=style,
        linewidth=2.0 if curve.label == "mean" else None,
        marker="o" if len(curve.values) < _MAX_POINTS_WITH_MARKERS else None,
        markersize=3,
    )
    return line


def _draw_marks(axes: Axes, record: RunRecord, colours: Mapping[str, str]) -> None:
    resumes, phases = locate_events(record, "resume"), locate_phase_starts(record)
    for style, positions in (("dashed", resumes), ("dotted", phases)):
        for tokens in positions.tokens:
            axes.axvline(tokens, color=colours[MUTED], linestyle=style, linewidth=0.8, zorder=1)


def _format_score_limit(record: RunRecord) -> str:
    limits = [row["limit"] for row in record.scores.values() if isinstance(row.get("limit"), int)]
    return f"Some scores are of the first {max(limits)} examples of a task." if limits else ""


def _label_axes(axes: Axes, panel: Panel) -> None:
    axes.set_xlabel("tokens")
    axes.set_ylabel(panel.unit)
    for value in panel.axis_includes:
        bottom, top = axes.get_ylim()
        axes.set_ylim(min(bottom, value), max(top, value))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        axis.set_major_formatter(FuncFormatter(lambda value, _: format_short(value)))


def _render_svg_element(figure: Figure, alt_text: str) -> str:
    """Return the SVG element of a figure, with CSS variables instead of placeholder colours."""
    buffer = io.StringIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    svg = buffer.getvalue()
    view_box = re.search(r'viewBox="[^"]*"', svg)
    assert view_box is not None, "matplotlib writes a viewBox"
    body = svg[svg.index("</defs>") + len("</defs>") :]
    body = re.sub(r' id="[a-z]+[.a-z0-9]*_\d+"', "", body)
    body = re.sub(r" font-family: [^;]*;", "", body)
    body = re.sub(r"#[0-9a-f]{6}(?=[;\"])", lambda match: _CSS_VARIABLES[match[0]], body)
    return f'<svg {view_box[0]} role="img" aria-label="{escape(alt_text)}">{body}'
