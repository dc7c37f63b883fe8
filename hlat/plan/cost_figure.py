"""Cost per 4 million tokens over the number of nodes, relative to a baseline (HLAT, figure 5)."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from hlat.config.mfu import compute_cost_per_4m_tokens
from hlat.figures.report_figure import FIGURE_SIZE, ReportFigure, get_line_style
from hlat.plan.token_cost import TokenCost
from hlat.study.run_record import RunRecord
from hlat.tracking.text_format import UNKNOWN, format_percent

TITLE = "Cost per 4 million tokens"
_LOG_SCALE_RATIO = 4
"""Ratio of the axis limits above which the axis is logarithmic."""


def compute_measured_costs(records: Sequence[RunRecord]) -> list[TokenCost]:
    """Return the cost of each run from its median throughput and its price.

    Runs without a price, a configuration or a logged step are omitted.
    """
    costs = []
    for record in records:
        rates = record.get_column("tokens_per_second")
        rates = rates[rates > 0]
        if not len(rates):
            continue
        if (settings := record.model_settings) is None:
            continue
        usd = compute_cost_per_4m_tokens(settings.hardware, float(np.median(rates)))
        if usd is not None:
            label = settings.model.name or record.name
            costs.append(TokenCost(label, settings.hardware.nodes, usd))
    return sorted(costs, key=lambda cost: cost.nodes)


def get_baseline_usd(costs: Sequence[TokenCost]) -> float | None:
    """Return the lowest cost on the smallest number of nodes; None if all are on as many nodes."""
    known = [(cost.nodes, cost.usd) for cost in costs if cost.usd is not None]
    if len({nodes for nodes, _ in known}) < 2:
        return None
    return min(known)[1]


def build_cost_figure(costs: Sequence[TokenCost], baseline_usd: float) -> ReportFigure:
    """Return a figure of the costs in percent of the baseline."""

    def draw() -> Figure:
        figure = Figure(figsize=FIGURE_SIZE, layout="constrained")
        axes = figure.add_subplot()
        lines = []
        for index, (label, points) in enumerate(_group_by_label(costs).items()):
            colour, dashes = get_line_style(index, label)
            nodes, shares = zip(*((n, 100 * usd / baseline_usd) for n, usd in points), strict=True)
            lines += axes.plot(
                nodes,
                shares,
                color=colour,
                linestyle=dashes if len(points) > 1 else "none",
                marker="o",
                markersize=4,
                label=label,
            )
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(sorted({cost.nodes for cost in costs})))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda nodes, _: f"{nodes:g}")
        bottom, top = axes.get_ylim()
        if bottom <= 0 or top / bottom > _LOG_SCALE_RATIO:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:g}")
        axes.set_xlabel("nodes")
        axes.set_ylabel("% of the baseline")
        figure.legend(handles=lines, loc="outside upper left", ncols=2, fontsize=9)
        return figure

    return ReportFigure("cost", format_alt_text(costs, baseline_usd), draw)


def format_alt_text(costs: Sequence[TokenCost], baseline_usd: float) -> str:
    """Return the alternative text of the figure."""
    lines = []
    for label, points in _group_by_label(costs).items():
        shares = (
            f"{format_percent(100 * usd / baseline_usd)} on {nodes} nodes" for nodes, usd in points
        )
        lines.append(f"{label}: {', '.join(shares)}")
    return f"{TITLE} relative to {baseline_usd:.3g} USD. {'; '.join(lines)}."


def build_cost_table(
    costs: Sequence[TokenCost], baseline_usd: float
) -> list[tuple[str, str, str, str]]:
    """Return label, number of nodes, USD and percentage of the baseline of each cost."""
    return [
        (
            cost.label,
            str(cost.nodes),
            "out of memory" if cost.usd is None else f"{cost.usd:.3f}",
            UNKNOWN if cost.usd is None else format_percent(100 * cost.usd / baseline_usd),
        )
        for cost in costs
    ]


def _group_by_label(costs: Sequence[TokenCost]) -> dict[str, list[tuple[int, float]]]:
    groups: dict[str, list[tuple[int, float]]] = {}
    for cost in costs:
        if cost.usd is not None:
            groups.setdefault(cost.label, []).append((cost.nodes, cost.usd))
    return groups
