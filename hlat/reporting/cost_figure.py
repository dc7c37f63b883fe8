"""Cost per 4 million tokens over numbers of nodes, as shares of one: the paper's figure 5."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from hlat.config.errors import ConfigError
from hlat.config.told import run_of
from hlat.hardware import cost_per_4m_tokens
from hlat.planning.cost import Cost
from hlat.reporting.figures import SIZE, Picture, look
from hlat.reporting.record import Record
from hlat.reporting.wording import UNKNOWN, percent

NAME = "cost"
"""File name without ending."""
TITLE = "Cost per 4 million tokens"
_LARGE = 4
"""Times as much, from which on shares are told on a logarithmic axis."""


def measured(records: Sequence[Record]) -> list[Cost]:
    """Return what 4 million tokens cost each run, by its median throughput and its price.

    Runs without a price, a configuration or a logged step are left out.
    """
    found = []
    for record in records:
        rates = record.column("tokens_per_second")
        with suppress(ConfigError):
            config = run_of(record.config)
            known = rates[rates > 0]
            usd = (
                cost_per_4m_tokens(config.hardware, float(np.median(known))) if len(known) else None
            )
            if usd is not None:
                found.append(Cost(config.model.name or record.name, config.hardware.nodes, usd))
    return sorted(found, key=lambda one: one.nodes)


def of_fewest_nodes(costs: Sequence[Cost]) -> float | None:
    """Return the cost of the first of the runs on fewest nodes; None if all are on as many."""
    known = [(one.nodes, one.usd) for one in costs if one.usd is not None]
    if len({nodes for nodes, _ in known}) < 2:
        return None
    return min(known)[1]


def picture(costs: Sequence[Cost], whole_usd: float) -> Picture:
    """The picture of costs as shares of one."""

    def paint(colours: Mapping[str, str]) -> Figure:
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        lines = []
        for place, (label, points) in enumerate(_by_label(costs).items()):
            colour, dashes = look(place, label)
            nodes, shares = zip(*((n, 100 * usd / whole_usd) for n, usd in points), strict=True)
            lines += axes.plot(
                nodes,
                shares,
                color=colours[colour],
                linestyle=dashes if len(points) > 1 else "none",
                marker="o",
                markersize=4,
                label=label,
            )
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(sorted({one.nodes for one in costs})))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda nodes, _: f"{nodes:g}")
        bottom, top = axes.get_ylim()
        if bottom <= 0 or top / bottom > _LARGE:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:g}")
        axes.set_xlabel("nodes")
        axes.set_ylabel("% of the baseline")
        figure.legend(handles=lines, loc="outside upper left", ncols=2, fontsize=9)
        return figure

    return Picture(NAME, describe(costs, whole_usd), paint)


def describe(costs: Sequence[Cost], whole_usd: float) -> str:
    """What the figure shows, for those who do not see it."""
    told = "; ".join(
        f"{label}: "
        + ", ".join(f"{percent(100 * usd / whole_usd)} on {nodes} nodes" for nodes, usd in points)
        for label, points in _by_label(costs).items()
    )
    return f"{TITLE} as a share of {whole_usd:.3g} USD. {told}."


def table(costs: Sequence[Cost], whole_usd: float) -> list[tuple[str, str, str, str]]:
    """Per cost: label, nodes, USD, and the share of the baseline."""
    return [
        (
            one.label,
            str(one.nodes),
            "out of memory" if one.usd is None else f"{one.usd:.3f}",
            UNKNOWN if one.usd is None else percent(100 * one.usd / whole_usd),
        )
        for one in costs
    ]


def _by_label(costs: Sequence[Cost]) -> dict[str, list[tuple[int, float]]]:
    found = defaultdict[str, list[tuple[int, float]]](list)
    for one in costs:
        if one.usd is not None:
            found[one.label].append((one.nodes, one.usd))
    return found
