"""Result of a layout search as JSON and as text."""

from collections.abc import Sequence
from typing import Any

from hlat.config.run import Config
from hlat.plan import plan_text
from hlat.plan.achieved_speed import get_efficiency
from hlat.plan.configured_layout import ConfiguredLayout
from hlat.plan.forecast import forecast_run
from hlat.plan.layout_search import LayoutCandidate, count_equal_layouts
from hlat.plan.memory_estimate import get_device_memory_bytes
from hlat.tracking.text_format import format_count, format_gib, format_short

_NUM_BEST = 3


def summarize_search(layouts: Sequence[LayoutCandidate], own: ConfiguredLayout) -> dict[str, Any]:
    """Return all layouts and the configured one as JSON."""
    num_equal = count_equal_layouts(layouts)
    layout = None if own.candidate is None else plan_text.summarize_layout(own.candidate)
    return {
        "layouts": [
            {**plan_text.summarize_layout(layout), "equal_to_first": rank < num_equal}
            for rank, layout in enumerate(layouts)
        ],
        "configured": {"layout": layout, "explanation": own.explanation},
    }


def format_search(
    config: Config,
    layouts: Sequence[LayoutCandidate],
    own: ConfiguredLayout,
    overrides: Sequence[str] = (),
) -> list[str]:
    """Return the best layouts, and why the configured one is not the first.

    `overrides` are those of the run, a part of the command that trains the first layout.
    """
    num_fitting = sum(one.fits for one in layouts)
    lines = [
        plan_text.format_headline(config),
        f"{format_count(len(layouts))} valid layouts, {format_count(num_fitting)} fit",
    ]
    if layouts:
        if not num_fitting:
            layouts = sorted(layouts, key=lambda one: one.memory.total)
        lines += ["", _format_order(config, layouts), ""]
        rows = [*_select_best(layouts), *([own.candidate] if own.candidate else [])]
        lines += plan_text.format_layouts(rows, own.candidate)
        if num_fitting and layouts[0].step_s is not None:
            command = plan_text.format_command(layouts[0], overrides)
            lines += ["", *_format_first(layouts), *_format_equal_layouts(layouts), "", command]
        elif not num_fitting:
            least = layouts[0]
            capacity = get_device_memory_bytes(least.config)
            message = plan_text.format_infeasible_plan(least.config, least.memory, capacity)
            lines += ["", message]
    lines += ["", own.explanation]
    notes = plan_text.list_notes(config)
    return [*lines, "", *notes] if notes else lines


def _select_best(layouts: Sequence[LayoutCandidate]) -> list[LayoutCandidate]:
    """Return the first layout of each combination of degrees and ZeRO stage, at most three."""
    best: dict[tuple[int, ...], LayoutCandidate] = {}
    for one in layouts:
        layout = one.config.parallelism
        key = (layout.tp, layout.pp, layout.ep, layout.zero, layout.dp_replicate)
        if len(best) < _NUM_BEST:
            best.setdefault(key, one)
    return [*best.values()]


def _format_first(layouts: Sequence[LayoutCandidate]) -> list[str]:
    """Return step time, duration and cost of the first layout, with intervals."""
    forecast = forecast_run(layouts[0].config)
    speed = forecast.throughput
    assert speed is not None
    assert speed.step_interval_s is not None
    assert speed.days_interval is not None
    low_s, high_s = speed.step_interval_s
    low, high = speed.days_interval
    name = "80% interval" if speed.is_calibrated else "not calibrated"
    cost = "" if speed.cost_usd is None else f" and ${speed.cost_usd:,.0f}"
    return [
        f"the first: {plan_text.format_verdict(layouts[0].config, forecast)}",
        f"{name}: {low_s:,.3f} to {high_s:,.3f} s a step; {speed.days:,.1f} days ({low:,.1f} to "
        f"{high:,.1f}){cost} for {format_short(forecast.tokens)} tokens, without failures",
    ]


def _format_order(config: Config, layouts: Sequence[LayoutCandidate]) -> str:
    if not any(layout.fits for layout in layouts):
        return "none fits; least memory first:"
    if layouts[0].step_s is not None:
        capacity = format_gib(get_device_memory_bytes(layouts[0].config))
        return (
            "fastest of each tp, pp, ep, ZeRO stage and number of replicas; memory of a "
            f"{plan_text.get_device_noun(config)} in GiB of {capacity}:"
        )
    return (
        f"not ranked by speed, since step times on {config.hardware.name} are unknown; least "
        "memory first, which is often the slowest:"
    )


def _format_equal_layouts(layouts: Sequence[LayoutCandidate]) -> list[str]:
    """Return a line with the number of layouts whose intervals contain that of the first one."""
    if (count := count_equal_layouts(layouts)) < 2:
        return []
    low, high = get_efficiency(layouts[0].config).layout_interval
    return [
        f"{format_count(count)} layouts are at most {high / low - 1:.0%} slower, which their 80% "
        "intervals do not separate from the first: measure some of them"
    ]
