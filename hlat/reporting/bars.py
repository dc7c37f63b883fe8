"""The figure of where a run's time went: a bar for the run, and one for each attempt.

Bars are of one length, because an attempt that died in its first minute matters as much for what
went wrong as one that lasted a week; how long each was stands beside it.
"""

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from hlat.recovery.goodput import Attempt, Ledger
from hlat.reporting.figures import INK, MUTED, PAPER, SERIES, SIZE, Picture
from hlat.reporting.lifetime import LABELS, spent
from hlat.reporting.wording import duration, percent

NAME = "time"
"""File name without ending."""
MAX_ATTEMPTS = 12
"""Attempts that the figure shows; of more, the last ones."""
_LEAST_SHARE, _LEAST_TOLD = 0.002, 0.08
_LOOKS: dict[str, tuple[str, str | None]] = {
    "startup": (SERIES[3], None),
    "preflight": (SERIES[3], "////"),
    "compile": (SERIES[4], None),
    "steps": (SERIES[0], None),
    "data_wait": (SERIES[0], "////"),
    "evaluation": (SERIES[2], "////"),
    "checkpoint": (SERIES[2], None),
    "lost": (SERIES[1], None),
    "down": (MUTED, None),
    "unaccounted": (INK, "...."),
}
"""Colour and hatching by kind: what belongs together shares a colour."""


def picture(ledger: Ledger) -> Picture:
    """The picture of the ledger."""
    shown: list[Attempt | Ledger] = [ledger]
    if len(ledger.attempts) > 1:
        shown += ledger.attempts[-MAX_ATTEMPTS:]
    kinds = [kind for kind in LABELS if any(_shares(one)[kind] > _LEAST_SHARE for one in shown)]

    def paint(colours: Mapping[str, str]) -> Figure:
        height = 0.85 + 0.33 * len(shown) + 0.22 * -(-len(kinds) // 2)
        figure = Figure(figsize=(SIZE[0], height), layout="constrained")
        axes = figure.add_subplot()
        for place, one in enumerate(shown):
            _draw_bar(axes, place, _shares(one), colours)
        axes.set_yticks(range(len(shown)), [_name(one) for one in shown])
        axes.invert_yaxis()
        axes.set_xlim(0, 100)
        axes.set_xlabel("% of wall time")
        axes.grid(visible=False)
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        patches = [Patch(label=LABELS[kind], **_look(kind, colours)) for kind in kinds]
        figure.legend(handles=patches, loc="outside upper left", ncols=2, fontsize=9)
        return figure

    return Picture(NAME, describe(ledger), paint)


def describe(ledger: Ledger) -> str:
    """What the figure shows, for those who do not see it."""
    shares = {kind: share for kind, share in _shares(ledger).items() if share > _LEAST_SHARE}
    parts = sorted(shares, key=lambda kind: -shares[kind])
    told = ", ".join(f"{LABELS[kind].lower()} {percent(100 * shares[kind])}" for kind in parts)
    return f"Where {duration(ledger.wall)} of wall time went: {told}."


def caption(ledger: Ledger) -> str:
    """What a reader must know to read the figure."""
    if len(ledger.attempts) > MAX_ATTEMPTS:
        return f"The last {MAX_ATTEMPTS} of {len(ledger.attempts)} attempts."
    return ""


def _draw_bar(axes: Axes, place: int, shares: dict[str, float], colours: Mapping[str, str]) -> None:
    left = 0.0
    for kind, share in shares.items():
        if share <= 0:
            continue
        axes.barh(place, 100 * share, left=100 * left, height=0.72, **_look(kind, colours))
        if share >= _LEAST_TOLD and _LOOKS[kind][1] is None:
            middle = 100 * (left + share / 2)
            text = f"{100 * share:.0f}%"
            axes.text(
                middle, place, text, color=colours[PAPER], ha="center", va="center", fontsize=9
            )
        left += share


def _look(kind: str, colours: Mapping[str, str]) -> dict[str, Any]:
    colour, hatch = _LOOKS[kind]
    return {
        "facecolor": colours[colour],
        "edgecolor": colours[PAPER],
        "hatch": hatch,
        "linewidth": 0.7,
    }


def _name(one: Attempt | Ledger) -> str:
    name = "all" if isinstance(one, Ledger) else f"attempt {one.number}"
    return f"{name}, {duration(one.wall)}"


def _shares(one: Attempt | Ledger) -> dict[str, float]:
    return {kind: seconds / one.wall if one.wall else 0.0 for kind, seconds in spent(one).items()}
