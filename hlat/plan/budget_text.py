"""Plan of a budget as JSON and as text."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hlat.model.decoder_spec import count_parameters
from hlat.plan.plan_text import format_command, list_notes, summarize_layout
from hlat.plan.training_budget import BudgetOption, BudgetPlan
from hlat.tracking.text_format import format_count, format_short, format_table

_HEADERS = ["price", "nodes", "days", "cost, USD", "tokens", "per parameter", "layout"]


def summarize_budget(plan: BudgetPlan) -> dict[str, Any]:
    """Return a plan of a budget as JSON."""
    law = asdict(plan.optimum.law)
    return {
        "budget_usd": plan.budget_usd,
        "max_days": plan.max_days,
        "options": [_summarize_option(option) for option in plan.options],
        "best": _summarize_option(plan.best),
        "tokens_interval": plan.tokens_interval,
        "is_calibrated": plan.is_calibrated,
        "optimum": {
            "law": law,
            "flops": plan.optimum.flops,
            "parameters": plan.optimum.parameters,
            "tokens": plan.optimum.tokens,
        },
    }


def _summarize_option(option: BudgetOption) -> dict[str, Any]:
    return {
        "nodes": option.nodes,
        "price": asdict(option.price),
        "days": option.days,
        "cost_usd": option.cost_usd,
        "tokens": option.tokens,
        "is_efficient": option.is_efficient,
        "layout": summarize_layout(option.layout),
    }


def format_budget(plan: BudgetPlan, overrides: Sequence[str] = ()) -> list[str]:
    """Return the efficient options, the tokens of the best one, and the compute-optimal model."""
    best, optimum = plan.best, plan.optimum
    config = best.layout.config
    size = count_parameters(config.model)
    limit = "" if plan.max_days is None else f", {plan.max_days:g} days at most"
    low, high = plan.tokens_interval
    interval = "80% interval" if plan.is_calibrated else "range, not calibrated,"
    rows = [_build_row(option, size) for option in plan.options if option.is_efficient]
    origins = dict.fromkeys(f"{one.price.name}: {_format_price(one)}" for one in plan.options)
    return [
        f"{config.model.name}, {format_short(size)} parameters, in {config.precision.name} on "
        f"{config.hardware.name}; ${plan.budget_usd:,.0f}{limit}, without failures",
        "",
        *format_table(_HEADERS, rows),
        "",
        *origins,
        "",
        f"most tokens: {format_short(best.tokens)} on {format_count(best.nodes)} "
        f"{'node' if best.nodes == 1 else 'nodes'} in {format_short(best.days)} days, {interval} "
        f"{format_short(low)} to {format_short(high)}",
        format_command(best.layout, overrides, "to train it:"),
        *([] if plan.max_days else ["days=N limits the duration"]),
        "",
        f"compute-optimal for these {optimum.flops:.3g} FLOPs: {format_short(optimum.parameters)} "
        f"parameters and {format_short(optimum.tokens)} tokens, at the speed of "
        f"{config.model.name}",
        f"law: {optimum.law.name}",
        *(f"WARNING: {warning}" for warning in optimum.law.warnings),
        "",
        *list_notes(config),
    ]


def _build_row(option: BudgetOption, num_parameters: int) -> list[str]:
    layout = option.layout.config.parallelism
    stages = f" of {layout.stages_per_rank}" if layout.stages_per_rank > 1 else ""
    settings = [f"tp {layout.tp}", f"pp {layout.pp}{stages}", f"zero {layout.zero}"]
    if layout.ep > 1:
        settings.append(f"ep {layout.ep}")
    if layout.dp_replicate > 1:
        settings.append(f"{layout.dp_replicate} replicas")
    return [
        option.price.name,
        format_count(option.nodes),
        format_short(option.days),
        f"{option.cost_usd:,.0f}",
        format_short(option.tokens),
        f"{option.tokens / num_parameters:,.1f}",
        ", ".join(settings),
    ]


def _format_price(option: BudgetOption) -> str:
    return f"${option.price.usd_per_hour:,.2f} a node and hour, {option.price.origin}"
