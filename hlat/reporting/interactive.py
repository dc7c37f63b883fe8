"""Figures that answer: a read-out, zoom, other axes; with a table for those who do not see them.

Each figure is on the page as SVG, which print and browsers without scripts show, and as data, which
the page's one script draws anew. The policy of a page lets that script run by its digest, and no
other, so a text that got past the escaping could still do nothing.
"""

import base64
import hashlib
import json
import math
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlat.reporting.curves import Curve, marks, means, most_points, thin
from hlat.reporting.figures import Panel, caption, drawable, look, phases, variable
from hlat.reporting.record import Record
from hlat.reporting.wording import short, whole

SCRIPT = Path(__file__).with_name("interactive.js").read_text(encoding="utf-8")
_DIGEST = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; script-src 'sha256-{_DIGEST}'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)
"""Content-Security-Policy of every page."""
CSS = """
.area { position: relative; }
svg.plot { display: block; width: 100%; height: 270px; max-width: none; touch-action: pan-y;
  cursor: crosshair; user-select: none; -webkit-user-select: none; }
svg.plot text { fill: var(--muted); font-size: 12px; }
svg.plot path { fill: none; }
.plot .grid { stroke: var(--grid); stroke-width: 0.7; }
.plot .frame, .plot .mark, .plot .cursor { stroke: var(--muted); stroke-width: 0.8; }
.plot .chosen { fill: var(--series-1); opacity: 0.18; }
.area output { position: absolute; top: 0; padding: 0.25rem 0.5rem; border-radius: 4px;
  pointer-events: none; background: var(--paper); border: 1px solid var(--muted);
  font-size: 0.8rem; line-height: 1.35; font-variant-numeric: tabular-nums; max-width: 100%;
  overflow-wrap: anywhere; }
.choices { display: flex; flex-wrap: wrap; gap: 0.3rem; margin: 0 0 0.3rem; }
.choices .scale { margin-left: auto; }
button, select { font: inherit; font-size: 0.82rem; color: var(--ink); background: var(--paper);
  border: 1px solid var(--muted); border-radius: 4px; padding: 0.15rem 0.5rem; min-height: 1.8rem;
  max-width: 100%; overflow-wrap: anywhere; }
button[aria-pressed="false"] { color: var(--muted); border-style: dashed; }
.choices button[aria-pressed="false"] > svg { opacity: 0.25; }
.choices button[aria-pressed="true"].scale { border-width: 2px; font-weight: 600; }
button:disabled { opacity: 0.5; }
.choices svg { width: 26px; vertical-align: middle; display: inline; }
#controls { display: flex; flex-wrap: wrap; gap: 0.4rem 1.5rem; align-items: center; }
#controls fieldset { border: 0; margin: 0; padding: 0; display: flex; flex-wrap: wrap;
  gap: 0 0.8rem; }
#controls legend { float: left; padding: 0; margin-right: 0.8rem; }
#controls[hidden], #plot-help[hidden], output[hidden] { display: none; }
#plot-help { font-size: 0.85rem; color: var(--muted); margin: 0.4rem 0 1rem; }
figure details { font-size: 0.85rem; margin: 0.2rem 0; }
@media screen { figure.live > svg.still { display: none; } }
@media print { .area, .choices, #controls, #plot-help { display: none !important; } }
"""
_SHARES = {"0": "nothing", "0.002": "0.2 %", "0.01": "1 %", "0.03": "3 %", "0.1": "10 %"}
CONTROLS = (
    '<div id="controls" role="group" aria-label="All figures" hidden>\n'
    "<fieldset><legend>Over</legend>"
    + "".join(
        f'<label><input type="radio" name="axis" value="{axis}"> {axis}</label>'
        for axis in ("tokens", "steps", "hours")
    )
    + "</fieldset>\n<label>Smooth the loss over <select>"
    + "".join(f'<option value="{share}">{name}</option>' for share, name in _SHARES.items())
    + "</select> of the run</label>\n"
    '<button type="button" disabled>Show the whole run</button>\n</div>\n'
    '<p id="plot-help" hidden>Drag along a figure to enlarge that stretch in all of them, drag '
    "with Shift to move, double-click to see the whole run. With the keyboard: arrows read values, "
    "with Shift they move; + and - enlarge and reduce, Escape shows the whole run, L changes the "
    "scale.</p>\n"
)
"""What a reader can choose for all figures; shown once the script runs."""
_ROWS = 12


def figure(panel: Panel, svg: str, record: Record | None = None) -> str:
    """Return a figure of a page.

    Args:
        panel: What it shows.
        svg: The same as an SVG element.
        record: The run whose restarts and phases are marked; None: nothing is marked.
    """
    # "<" cannot occur in what a script element holds, so no text of a run ends it
    told = json.dumps(_data(panel, record), separators=(",", ":"), allow_nan=False)
    return (
        f'<figure data-plot="{escape(panel.name)}">\n<h3>{escape(panel.title)}</h3>\n{svg}'
        f'<script type="application/json">{told.replace("<", chr(92) + "u003c")}</script>\n'
        f"<figcaption>{escape(caption(panel))}</figcaption>\n{_table(panel)}</figure>\n"
    )


def _data(panel: Panel, record: Record | None) -> dict[str, Any]:
    curves = list(filter(drawable, panel.curves))
    most = most_points(len(panel.curves))
    return {
        "name": panel.name,
        "title": panel.title,
        "unit": panel.unit,
        "atLeast": panel.at_least,
        "smooth": panel.smooth,
        "series": [_series(i, curve, most, panel.smooth) for i, curve in enumerate(curves)],
        "resumed": {} if record is None else _places(marks(record, "resume")),
        "phases": {} if record is None else _places(phases(record)),
    }


def _series(place: int, curve: Curve, most: int, smooth: bool) -> dict[str, Any]:
    colour, dashes = look(place, curve.label)
    shown = thin(curve, most)
    told: dict[str, Any] = {"label": curve.label, "colour": variable(colour), "dashes": dashes}
    told |= _places(shown) | {"values": _numbers(shown.values)}
    if shown.errors is not None:
        told["errors"] = _numbers(shown.errors)
    if smooth and shown is not curve:
        mean = means(curve, most)
        told["means"] = _places(mean) | {"values": _numbers(mean.values)}
    return told


def _places(curve: Curve) -> dict[str, list[float | None]]:
    return {
        "tokens": _numbers(curve.tokens, 15),
        "steps": _numbers(curve.steps, 15),
        "hours": _numbers(curve.hours),
    }


def _numbers(values: NDArray[np.float64], digits: int = 7) -> list[float | None]:
    """Return numbers as JSON has them: of so many digits, null for what is none."""
    return [
        None if math.isnan(value) else int(value) if value.is_integer() else _cut(value, digits)
        for value in values.tolist()
    ]


def _cut(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def _table(panel: Panel) -> str:
    """The figure as a table: of each curve its ends, and rows at even distances between them."""
    several = len(panel.curves) > 1
    rows = "".join(
        "<tr>"
        + (f"<td>{escape(curve.label)}</td>" if several else "")
        + f'<th scope="row" class="number">{whole(curve.tokens[i])}</th>'
        f'<td class="number">{whole(curve.steps[i])}</td>'
        f'<td class="number">{short(curve.hours[i])}</td>'
        f'<td class="number">{_value(curve, i)}</td></tr>\n'
        for curve in filter(drawable, panel.curves)
        for i in _sampled(curve)
    )
    heads = ("Tokens", "Step", "Hours", panel.unit or panel.title)
    told = "".join(f'<th scope="col" class="number">{escape(head)}</th>' for head in heads)
    curve = '<th scope="col">Curve</th>' if several else ""
    return (
        "<details>\n<summary>As a table</summary>\n"
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(panel.title)}">\n'
        f"<table>\n<caption>{escape(panel.title)}, at most {_ROWS} rows of each curve</caption>\n"
        f"<thead>\n<tr>{curve}{told}</tr>\n</thead>\n<tbody>\n{rows}</tbody>\n</table>\n</div>\n"
        "</details>\n"
    )


def _sampled(curve: Curve) -> list[int]:
    known = np.flatnonzero(~np.isnan(curve.values))
    chosen = np.linspace(0, len(known) - 1, min(_ROWS, len(known)))
    return [int(i) for i in known[np.round(chosen).astype(np.intp)]]


def _value(curve: Curve, place: int) -> str:
    value = f"{curve.values[place]:.6g}"
    if curve.errors is None or math.isnan(curve.errors[place]):
        return value
    return f"{value} ± {short(curve.errors[place])}"
