"""Scripts of the pages, and data of their interactive figures.

A page contains each figure as SVG, for print and browsers without scripts, and as JSON, which the
script of the page draws. The script also makes tables sortable. The content security policy allows
only these scripts, by their digests, so that text which is not escaped could not run.
"""

import base64
import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlat.figures.report_figure import CSS_VARIABLES, Panel, get_curve_style
from hlat.study.metric_curves import (
    Curve,
    compute_max_points,
    downsample_mean,
    downsample_min_max,
    locate_marks,
)
from hlat.study.run_record import RunRecord
from hlat.tracking.text_format import format_count, format_short


def _read_script(name: str) -> str:
    return Path(__file__).with_name(f"{name}.js").read_text(encoding="utf-8")


def _format_digest(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


SCRIPT = "".join(map(_read_script, ("page_tools", "sortable_tables", "interactive_figures")))
ITEM_SCRIPT = _read_script("item_browser")
"""Script of the page of benchmark items, after SCRIPT."""
CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; script-src {_format_digest(SCRIPT)} {_format_digest(ITEM_SCRIPT)}; "
    "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
)
SMOOTHING_OPTIONS = {"0": "nothing", "0.002": "0.2 %", "0.01": "1 %", "0.03": "3 %", "0.1": "10 %"}
"""Label of each window of the moving average, as a fraction of the run."""
MAX_TABLE_ROWS = 12


def build_figure_data(panel: Panel, record: RunRecord | None) -> dict[str, Any]:
    """Return the data of a panel for the script; mark the restarts and phases of `record`."""
    curves = panel.curves_with_values
    max_points = compute_max_points(len(panel.curves))
    marks = {} if record is None else locate_marks(record)
    return {
        "name": panel.name,
        "title": panel.title,
        "unit": panel.unit,
        "atLeast": panel.axis_includes,
        "smooth": panel.can_smooth,
        "series": [
            _build_series(i, curve, max_points, panel.can_smooth) for i, curve in enumerate(curves)
        ],
        "resumed": {},
        "changed": {},
        "phases": {},
        **{name: _serialize_positions(curve) for name, curve in marks.items()},
    }


def build_table_columns(panel: Panel) -> list[tuple[str, str]]:
    """Return header and style of each column of a panel's table."""
    label = [("Curve", "")] if len(panel.curves) > 1 else []
    values = [(header, "number") for header in ("Step", "Hours", panel.unit or panel.title)]
    return [*label, ("Tokens", "row number"), *values]


def build_table_rows(panel: Panel) -> list[list[str]]:
    """Return at most `MAX_TABLE_ROWS` evenly spaced rows of each curve, with both ends."""
    return [
        [
            *([curve.label] if len(panel.curves) > 1 else []),
            format_count(curve.tokens[i]),
            format_count(curve.steps[i]),
            format_short(curve.hours[i]),
            _format_value(curve, i),
        ]
        for curve in panel.curves_with_values
        for i in _sample_indices(curve)
    ]


def _build_series(index: int, curve: Curve, max_points: int, can_smooth: bool) -> dict[str, Any]:
    colour, dashes = get_curve_style(index, curve)
    shown = downsample_min_max(curve, max_points)
    series: dict[str, Any] = {
        "label": curve.label,
        "colour": CSS_VARIABLES[colour],
        "dashes": dashes,
        **_serialize_positions(shown),
        "values": _serialize_values(shown.values),
    }
    for name in ("errors", "lows", "highs"):
        if (column := getattr(shown, name)) is not None:
            series[name] = _serialize_values(column)
    if curve.kind:
        series["kind"] = curve.kind
    if can_smooth and shown is not curve:
        mean = downsample_mean(curve, max_points)
        series["means"] = _serialize_positions(mean) | {"values": _serialize_values(mean.values)}
    return series


def _serialize_positions(curve: Curve) -> dict[str, Any]:
    positions: dict[str, Any] = {
        "tokens": _serialize_values(curve.tokens, 15),
        "steps": _serialize_values(curve.steps, 15),
        "hours": _serialize_values(curve.hours),
    }
    if math.isfinite(curve.flops_per_token):
        positions["flopsPerToken"] = curve.flops_per_token
    return positions


def _serialize_values(values: NDArray[np.float64], digits: int = 7) -> list[float | None]:
    """Return numbers with `digits` significant digits; None for NaN."""
    return [
        None
        if math.isnan(value)
        else int(value)
        if value.is_integer()
        else float(f"{value:.{digits}g}")
        for value in values.tolist()
    ]


def _sample_indices(curve: Curve) -> list[int]:
    known = np.flatnonzero(~np.isnan(curve.values))
    sample = np.linspace(0, len(known) - 1, min(MAX_TABLE_ROWS, len(known)))
    return [int(i) for i in known[np.round(sample).astype(np.intp)]]


def _format_value(curve: Curve, index: int) -> str:
    value = f"{curve.values[index]:.6g}"
    if curve.errors is None or math.isnan(curve.errors[index]):
        return value
    return f"{value} ± {format_short(curve.errors[index])}"
