"""Balance of the experts of each layer over the steps of a run, and their loads at its end."""

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from hlat.figures.report_figure import FIGURE_SIZE, SERIES, ReportFigure
from hlat.study.run_record import RunRecord, get_number
from hlat.tracking.row_validation import Row, is_finite_number
from hlat.tracking.text_format import format_count, format_short

_VIOLATIONS, _LOADS = "router_violations", "router_loads"
"""Columns of metrics.jsonl, and names of the figures."""
_MAX_COLUMNS = 160
"""Columns of the heat map; with more logged steps, a column is the largest value of several."""
_MAX_LAYERS = 10_000
_VIOLATION_CAPTION = (
    "Maximum violation: largest load of an expert divided by the mean load, minus 1; 0 is balanced."
)
_LOAD_CAPTION = "Load: tokens that select an expert, divided by their mean; 1 is balanced."


def build_router_figures(record: RunRecord) -> list[ReportFigure]:
    """Return the figures of the experts; empty without experts."""
    figures = (_build_violation_figure(record), _build_load_figure(record))
    return [figure for figure in figures if figure is not None]


def _build_violation_figure(record: RunRecord) -> ReportFigure | None:
    """Return a heat map of the maximum violation over layers and steps; None without experts."""
    rows = [row for row in record.metrics if _get_violations(row)]
    if not rows:
        return None
    steps = np.array([get_number(row, "step") for row in rows])
    values = _bin_steps(steps, _build_matrix(rows))

    half = _compute_spacing(steps) / 2
    columns = (steps[0] - half, steps[-1] + half)
    return ReportFigure(
        _VIOLATIONS,
        _format_alt_text(steps, values),
        lambda: _draw_heat_map(values, columns, "step", "maximum violation"),
        "Maximum violation by layer",
        _VIOLATION_CAPTION,
    )


def _build_load_figure(record: RunRecord) -> ReportFigure | None:
    """Return a heat map of the loads of the newest step over layers and experts."""
    rows = [row for row in record.metrics if _LOADS in row]
    loads = _parse_loads(rows[-1][_LOADS]) if rows else None
    if loads is None:
        return None
    step, (num_layers, num_experts) = get_number(rows[-1], "step"), loads.shape
    columns, largest = (-0.5, num_experts - 0.5), np.nanmax(loads)
    return ReportFigure(
        _LOADS,
        f"Load of {num_experts} experts in {num_layers} layers at step {format_count(step)}; "
        f"from {format_short(np.nanmin(loads))} to {format_short(largest)}.",
        lambda: _draw_heat_map(loads, columns, "expert", "load"),
        f"Load of experts at step {format_count(step)}",
        _LOAD_CAPTION,
    )


def _draw_heat_map(
    values: NDArray[np.float64], columns: tuple[float, float], x_label: str, label: str
) -> Figure:
    """Draw values of each layer, [L, n], over a range of the horizontal axis, and their scale."""
    figure = Figure(figsize=FIGURE_SIZE, layout="constrained")
    axes, scale = figure.subplots(1, 2, width_ratios=[30, 1])
    largest = float(np.nanmax(values)) or 1.0
    _draw_cells(axes, values / largest, (*columns, -0.5, len(values) - 0.5))
    axes.set_xlabel(x_label)
    axes.set_ylabel("layer")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6, integer=True))
    _draw_cells(scale, np.linspace(0, 1, 64)[:, np.newaxis], (0, 1, 0, largest))
    scale.set_xticks([])
    scale.yaxis.tick_right()
    scale.yaxis.set_label_position("right")
    scale.set_ylabel(label)
    return figure


def _parse_loads(value: Any) -> NDArray[np.float64] | None:
    """Return the loads of each layer, [L, E], NaN for layers without experts; None if invalid."""
    if not isinstance(value, list) or len(value) > _MAX_LAYERS:
        return None
    lists = [layer for layer in value if isinstance(layer, list)]
    sizes = {len(layer) for layer in lists}
    numbers = [load for layer in lists for load in layer]
    if len(sizes) != 1 or not numbers or not all(map(is_finite_number, numbers)):
        return None
    missing = [math.nan] * sizes.pop()
    return np.array([layer if isinstance(layer, list) else missing for layer in value], float)


def _get_violations(row: Row) -> list[float]:
    """Return the value of each layer, NaN for layers without one; empty if there is none."""
    values = row.get(_VIOLATIONS)
    if not isinstance(values, list) or len(values) > _MAX_LAYERS:
        return []
    numbers = [float(value) if is_finite_number(value) else math.nan for value in values]
    return [] if all(map(math.isnan, numbers)) else numbers


def _build_matrix(rows: list[Row]) -> NDArray[np.float64]:
    """Return the values of each layer and row, [L, n]."""
    columns = [_get_violations(row) for row in rows]
    matrix = np.full((max(map(len, columns)), len(rows)), np.nan)
    for n, column in enumerate(columns):
        matrix[: len(column), n] = column
    return matrix


def _bin_steps(steps: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the largest value of each layer in intervals of equal length, NaN without one."""
    num_columns = min(len(steps), _MAX_COLUMNS)
    span, spacing = steps[-1] - steps[0], _compute_spacing(steps)
    position = (steps - steps[0] + spacing / 2) / (span + spacing) * num_columns
    columns = np.clip(position.astype(np.intp), 0, num_columns - 1)
    binned = np.full((len(values), num_columns), np.nan)
    for n, column in enumerate(columns):
        binned[:, column] = np.fmax(binned[:, column], values[:, n])
    return binned


def _compute_spacing(steps: NDArray[np.float64]) -> float:
    """Return the mean distance of logged steps."""
    return float(steps[-1] - steps[0]) / (len(steps) - 1) if len(steps) > 1 else 1.0


def _draw_cells(
    axes: Axes, shares: NDArray[np.float64], extent: tuple[float, float, float, float]
) -> None:
    """Draw values between 0 and 1 as an image of one colour with that opacity.

    An image of one colour is legible on light and dark pages.
    """
    image = np.empty((*shares.shape, 4))
    image[..., :3], image[..., 3] = to_rgb(SERIES[0]), np.nan_to_num(shares)
    axes.imshow(image, origin="lower", aspect="auto", interpolation="nearest", extent=extent)
    axes.grid(visible=False)


def _format_alt_text(steps: NDArray[np.float64], values: NDArray[np.float64]) -> str:
    """Return the alternative text: range of the steps, largest value and values at the end."""
    layer, _ = np.unravel_index(int(np.nanargmax(values)), values.shape)
    last = values[:, -1]
    return (
        f"Maximum violation of {len(values)} layers over the steps {format_count(steps[0])} to "
        f"{format_count(steps[-1])}; highest {format_short(np.nanmax(values))} in layer {layer}, "
        f"at the end from {format_short(np.nanmin(last))} to {format_short(np.nanmax(last))}."
    )
