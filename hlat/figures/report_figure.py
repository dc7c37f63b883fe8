"""Figures as SVG with the colours of the page, and as PNG on a white background.

A figure is drawn in the light colours of the palette, which become CSS variables, so that one SVG
follows the light or dark scheme of its page. A standalone SVG file contains the variables. Each
panel is a separate figure, which stays legible on a phone.
"""

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from hlat.study.metric_curves import (
    Curve,
    build_average_curves,
    build_data_wait_curve,
    build_heldout_curves,
    build_metric_curve,
    build_score_curves,
    compute_max_points,
    downsample_min_max,
    locate_marks,
)
from hlat.study.run_record import RunRecord
from hlat.tracking.text_format import format_count, format_short

_PALETTE = {
    "paper": ("#ffffff", "#14171a"),
    "ink": ("#1c2024", "#e8eaed"),
    "muted": ("#5a6470", "#a3adb8"),
    "grid": ("#dfe3e8", "#31373d"),
    "surface": ("#f5f7f9", "#1c2126"),
    "series-1": ("#0072b2", "#56b4e9"),
    "series-2": ("#c04f00", "#f5843c"),
    "series-3": ("#007a5a", "#2fc79b"),
    "series-4": ("#9b4a85", "#dd8fc0"),
    "series-5": ("#806000", "#e6c229"),
}
"""Light and dark colours by CSS variable, after the colour-blind safe palette of Okabe and Ito."""
_LIGHT, _DARK = (
    " ".join(f"--{name}: {colours[scheme]};" for name, colours in _PALETTE.items())
    for scheme in (0, 1)
)
PALETTE_CSS = (
    f"\n:root {{ color-scheme: light dark; {_LIGHT} }}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}\n"
)
"""CSS variables of a page."""
PAPER, INK, MUTED, _GRID, _, *SERIES = (light for light, _ in _PALETTE.values())
CSS_VARIABLES = {light: f"--{name}" for name, (light, _) in _PALETTE.items()}
_MAX_LABELS, _MAX_LABEL_ROWS = 40, 6
"""Number of curves up to which a legend has all labels, and rows of the legend of more curves."""
_NUM_FREE_ROWS, _LABEL_ROW_INCHES = 3, 0.21
"""Rows of a legend in a figure of the usual height, and the height that each further row adds."""
_LINE_STYLES = ["solid", "dashed", "dashdot", "dotted"]
_MARKS = {
    "resumed": ("dashed", "Dashed vertical lines: the run was resumed."),
    "changed": ("solid", "Solid vertical lines: settings changed, as listed at the top."),
    "phases": ("dotted", "Dotted vertical lines: the next phase began."),
}
"""Line style and meaning of the vertical lines in a panel."""
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
_MAX_POINTS_WITH_MARKERS, _MAX_OUTLIER_MARKS = 40, 80
_DPI = 200
_MIN_VALUES, _QUANTILE, _REACH, _MIN_GAIN = 20, 0.05, 1.5, 1.5
"""Constants of `compute_robust_range`."""


@dataclass(frozen=True)
class ReportFigure:
    """A figure that can be rendered as SVG and PNG.

    Attributes:
        name: File name without extension.
        alt_text: Alternative text for screen readers.
        draw: Function that draws the figure.
        panel: Panel of an interactive figure; None for a static figure.
        record: Run with the restarts and phases to mark in an interactive figure.
    """

    name: str
    alt_text: str
    draw: Callable[[], Figure]
    title: str = ""
    caption: str = ""
    panel: "Panel | None" = None
    record: RunRecord | None = None

    @cached_property
    def svg(self) -> str:
        """SVG element for a page that contains `PALETTE_CSS`."""
        return self.render_svg()

    def render_svg(self) -> str:
        """Return a reproducible SVG element, with CSS variables instead of colours."""
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        svg = self._save(format="svg", transparent=True, metadata=no_metadata).decode()
        view_box = re.search(r'viewBox="[^"]*"', svg)
        assert view_box is not None, "matplotlib writes a viewBox"
        body = svg[svg.index("</defs>") + len("</defs>") :]
        body = re.sub(r' id="[a-z]+[.a-z0-9]*_\d+"', "", body)
        body = re.sub(r" font-family: [^;]*;", "", body)
        body = re.sub(r"#[0-9a-f]{6}(?=[;\"])", lambda m: f"var({CSS_VARIABLES[m[0]]})", body)
        return f'<svg {view_box[0]} role="img" aria-label="{escape(self.alt_text)}">{body}'

    def render_png(self) -> bytes:
        """Return a PNG file with a white background."""
        # Without Software, the bytes do not depend on the version of matplotlib
        metadata = {"Software": None, "Description": self.alt_text}
        return self._save(format="png", dpi=_DPI, facecolor="white", metadata=metadata)

    def render_file(self, suffix: str) -> bytes:
        """Return the content of a `.svg` or `.png` file."""
        if suffix == ".png":
            return self.render_png()
        namespaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
        style = f"<style>{PALETTE_CSS}text {{ font-family: system-ui, sans-serif; }}</style>"
        opening, rest = self.svg.split(">", 1)
        return f"{opening.replace('<svg', f'<svg {namespaces}', 1)}>{style}{rest}".encode()

    def save(self, file: Path) -> None:
        """Save the figure as SVG or PNG, depending on the extension."""
        file.write_bytes(self.render_file(file.suffix))

    @cached_property
    def _figure(self) -> Figure:
        """Figure with the layout of an SVG; `savefig` would render it twice for the layout."""
        figure = self.draw()
        figure.dpi = FigureCanvasSVG.fixed_dpi
        FigureCanvasSVG(figure)
        layout_engine = figure.get_layout_engine()
        assert layout_engine is not None
        layout_engine.execute(figure)
        figure.set_layout_engine(None)
        return figure

    def _save(self, **options: Any) -> bytes:
        buffer = io.BytesIO()
        with matplotlib.rc_context({**MATPLOTLIB_STYLE, "svg.hashsalt": self.name}):
            self._figure.savefig(buffer, **options)
        return buffer.getvalue()


@dataclass(frozen=True)
class Panel:
    """A figure of curves over tokens.

    Attributes:
        name: File name without extension.
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

    @property
    def curves_with_values(self) -> list[Curve]:
        """Curves that have a value to draw."""
        return [curve for curve in self.curves if has_values(curve)]

    @property
    def static_curves(self) -> list[tuple[int, Curve]]:
        """Curves of a static figure with their index: bands over seeds, or else all curves."""
        curves = [*enumerate(self.curves_with_values)]
        bands = [(index, curve) for index, curve in curves if curve.kind == "band"]
        return bands or curves


METRIC_PANELS = (
    ("loss", "Training loss", "nats per token"),
    ("grad_norm", "Gradient norm", "l2, before clipping"),
    ("param_norm", "Parameter norm", "l2, all weights"),
    ("learning_rate", "Learning rate", ""),
    ("attention_logit_max", "Largest attention logit", ""),
    ("output_logit_max", "Largest output logit", ""),
    ("output_log_z", "log Z of the output", "nats"),
    ("update_rms", "Size of the update", "RMS / learning rate"),
    ("unchanged_weights", "Weights that the step leaves unchanged", "fraction"),
    ("moment_ratio_rms", "Gradient relative to its second moment", "RMS, largest"),
    ("moment_underflow", "Second moments below the square of eps", "fraction"),
)
"""Column of metrics.jsonl, title and unit."""


def build_run_panels(record: RunRecord) -> list[Panel]:
    """Return the panels of a run that have values."""
    throughput = build_metric_curve(record, "tokens_per_second")
    scores, wait = build_score_curves(record), build_data_wait_curve(record)
    heldout = build_heldout_curves(record) + build_average_curves(record)
    limits = [row["limit"] for row in record.scores.values() if isinstance(row.get("limit"), int)]
    note = f"Some scores are of the first {max(limits)} examples of a task." if limits else ""
    panels = [
        Panel(key, title, unit, [build_metric_curve(record, key)], can_smooth=key == "loss")
        for key, title, unit in METRIC_PANELS
    ]
    panels += [
        Panel("heldout", "Held-out text", "bits per byte", heldout),
        Panel("scores", "Evaluation", "score", scores, note=note),
        Panel("throughput", "Throughput", "tokens per second", [throughput], axis_includes=(0,)),
        Panel("data_wait", "Waiting for data", "% of step time", [wait], axis_includes=(0, 10)),
    ]
    return [panel for panel in panels if any(map(has_values, panel.curves))]


def _format_alt_text(panel: Panel) -> str:
    """Return the alternative text of a panel: first, last, smallest and largest values."""
    curves = [curve for _, curve in panel.static_curves]
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


def _format_caption(panel: Panel) -> str:
    """Return the caption of a panel: note, downsampling, missing values and error bars."""
    notes = [panel.note] if panel.note else []
    rows = max(len(curve.values) for curve in panel.curves)
    max_points = compute_max_points(len(panel.curves))
    if rows > max_points:
        notes.append(
            f"{format_count(rows)} rows, drawn as the smallest and largest value"
            f" of each of {format_count(max_points // 2)} windows."
        )
    single = [curve for curve in panel.curves if curve.kind != "band"]
    missing = sum(int(np.isnan(curve.values).sum()) for curve in single)
    if missing:
        notes.append(f"Not drawn, as missing or not finite: {format_count(missing)}.")
    errors = [curve.errors for curve in panel.curves if curve.errors is not None]
    if any(np.isfinite(error).any() for error in errors):
        notes.append("Error bars: one standard error in each direction.")
    values = np.concatenate([curve.values for _, curve in panel.static_curves])
    if compute_robust_range(values[~np.isnan(values)]) is not None:
        notes.append("Triangles at the edge: values outside of the axis.")
    if any(curve.lows is not None for curve in panel.curves):
        notes.append("Line: mean of the seeds. Band: from their smallest to their largest value.")
    return " ".join(notes)


def format_mark_legend(record: RunRecord) -> str:
    """Return the meaning of the vertical lines in the panels; empty if there are none."""
    marks = locate_marks(record)
    return " ".join(_MARKS[name][1] for name, curve in marks.items() if len(curve.steps))


def build_panel_figure(panel: Panel, record: RunRecord | None = None) -> ReportFigure:
    """Return the figure of a panel; mark the restarts and phases of `record`."""

    def draw() -> Figure:
        figure = Figure(figsize=FIGURE_SIZE, layout="constrained")
        axes = figure.add_subplot()
        max_points = compute_max_points(len(panel.curves))
        curves = [(i, downsample_min_max(c, max_points)) for i, c in panel.static_curves]
        lines = [_draw_curve(axes, i, curve) for i, curve in curves]
        if len(panel.curves) > 1:
            draw_legend(figure, lines, [curve.label for _, curve in curves])
        if record is not None:
            _draw_marks(axes, record)
        _draw_outliers(axes, curves)
        _label_axes(axes, panel)
        return figure

    alt_text, caption = _format_alt_text(panel), _format_caption(panel)
    return ReportFigure(panel.name, alt_text, draw, panel.title, caption, panel, record)


def has_values(curve: Curve) -> bool:
    """Return True if a curve has a value to draw."""
    return bool((~np.isnan(curve.values) & ~np.isnan(curve.tokens)).any())


def get_line_style(index: int, label: str) -> tuple[str, str]:
    """Return the colour and the line style of a curve without its own style."""
    if label == "mean":
        return INK, "solid"
    return SERIES[index % len(SERIES)], _LINE_STYLES[index % len(_LINE_STYLES)]


def get_curve_style(index: int, curve: Curve) -> tuple[str, str]:
    """Return the colour and the line style of a curve."""
    if curve.style is None:
        return get_line_style(index, curve.label)
    colour, line = curve.style
    return SERIES[colour % len(SERIES)], _LINE_STYLES[line % len(_LINE_STYLES)]


def draw_legend(figure: Figure, lines: Sequence[Artist], labels: Sequence[str]) -> None:
    """Draw the labels of curves above the axes; the first ones if there are too many."""
    columns = max(1, min(4, 60 // (6 + max(map(len, labels)))))  # not wider than the figure
    if len(labels) > _MAX_LABELS:
        num_shown = _MAX_LABEL_ROWS * columns - 1
        lines = [*lines[:num_shown], Line2D([], [], linestyle="none")]
        labels = [*labels[:num_shown], f"and {format_count(len(labels) - num_shown)} more"]
    num_more_rows = max(0, math.ceil(len(labels) / columns) - _NUM_FREE_ROWS)
    figure.set_figheight(FIGURE_SIZE[1] + num_more_rows * _LABEL_ROW_INCHES)
    figure.legend(lines, labels, loc="outside upper left", ncols=columns, fontsize=9)


def _draw_curve(axes: Axes, index: int, curve: Curve) -> Line2D:
    colour, style = get_curve_style(index, curve)
    if curve.lows is not None and curve.highs is not None:
        axes.fill_between(curve.tokens, curve.lows, curve.highs, color=colour, alpha=0.2, lw=0)
    if curve.errors is not None:
        low, high = curve.values - curve.errors, curve.values + curve.errors
        axes.vlines(curve.tokens, low, high, colors=colour, linewidth=1)
    (line,) = axes.plot(
        curve.tokens,
        curve.values,
        color=colour,
        linestyle=style,
        linewidth=2.0 if curve.label == "mean" else None,
        marker="o" if len(curve.values) < _MAX_POINTS_WITH_MARKERS else None,
        markersize=3,
    )
    return line


def _draw_outliers(axes: Axes, curves: Sequence[tuple[int, Curve]]) -> None:
    """Limit the vertical axis to values that are not outliers; mark the others at its edge."""
    values = np.concatenate([curve.values for _, curve in curves])
    limits = compute_robust_range(values[~np.isnan(values)])
    if limits is None:
        return
    bottom, top = limits
    margin = 0.05 * (top - bottom)
    axes.set_ylim(bottom - margin, top + margin)
    for index, curve in curves:
        colour, _ = get_curve_style(index, curve)
        sides = (
            (curve.values > top + margin, 1.02, "^"),
            (curve.values < bottom - margin, -0.02, "v"),
        )
        for outside, edge, marker in sides:
            if not outside.any():
                continue
            tokens = _thin(curve.tokens[outside], np.nanmax(curve.tokens) / _MAX_OUTLIER_MARKS)
            style: Any = {"color": colour, "linestyle": "none", "markersize": 3, "clip_on": False}
            transform = axes.get_xaxis_transform()
            axes.plot(tokens, np.full(len(tokens), edge), marker, transform=transform, **style)


def _thin(positions: NDArray[np.float64], spacing: float) -> NDArray[np.float64]:
    """Return the first position in each interval of a length."""
    _, indices = np.unique(np.floor(positions / spacing), return_index=True)
    return positions[indices]


def _draw_marks(axes: Axes, record: RunRecord) -> None:
    for name, curve in locate_marks(record).items():
        for tokens in curve.tokens:
            axes.axvline(tokens, color=MUTED, linestyle=_MARKS[name][0], linewidth=0.8, zorder=1)


def _label_axes(axes: Axes, panel: Panel) -> None:
    axes.set_xlabel("tokens")
    axes.set_ylabel(panel.unit)
    for value in panel.axis_includes:
        bottom, top = axes.get_ylim()
        axes.set_ylim(min(bottom, value), max(top, value))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        axis.set_major_formatter(FuncFormatter(lambda value, _: format_short(value)))


def compute_robust_range(values: NDArray[np.float64]) -> tuple[float, float] | None:
    """Return the range of finite values without outliers; None if the whole range is suitable.

    The range contains the values between two quantiles and, on both sides, a margin that is a
    multiple of their distance. The script of the page computes the same range of the visible values
    (`robustRange` in interactive_figures.js).
    """
    if len(values) < _MIN_VALUES:
        return None
    low, high = np.quantile(values, [_QUANTILE, 1 - _QUANTILE]).tolist()
    smallest, largest = float(values.min()), float(values.max())
    reach = _REACH * (high - low)
    bottom, top = max(smallest, low - reach), min(largest, high + reach)
    is_useful = reach > 0 and largest - smallest > _MIN_GAIN * (top - bottom)
    return (bottom, top) if is_useful else None
