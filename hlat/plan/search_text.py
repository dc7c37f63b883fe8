"""Result of a layout search as JSON and as text."""

from collections.abc import Sequence
from typing import Any

from hlat.config.run import Config
from hlat.plan import plan_text
from hlat.plan.configured_layout import ConfiguredLayout
from hlat.plan.layout_search import LayoutCandidate, count_equal_layouts
from hlat.plan.memory_estimate import get_device_memory_bytes
from hlat.tracking.text_format import format_count

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
    config: Config, layouts: Sequence[LayoutCandidate], own: ConfiguredLayout
) -> list[str]:
    """Return the best layouts, and why the configured one is not the first."""
    num_fitting = sum(one.fits for one in layouts)
    lines = [
        plan_text.format_headline(config),
        f"{format_count(len(layouts))} valid layouts, {format_count(num_fitting)} fit",
    ]
    if layouts:
        if not num_fitting:
            layouts = sorted(layouts, key=lambda one: one.memory.total)
        lines += ["", _format_order(config, layouts), ""]
        rows = [*layouts[:_NUM_BEST], *([own.candidate] if own.candidate else [])]
        lines += plan_text.format_layouts(rows, own.candidate)
        if num_fitting and layouts[0].step_s is not None:
            lines += ["", *_format_equal_layouts(layouts), plan_text.format_command(layouts[0])]
        elif not num_fitting:
            least = layouts[0]
            capacity = get_device_memory_bytes(least.config)
            message = plan_text.format_infeasible_plan(least.config, least.memory, capacity)
            lines += ["", message]
    lines += ["", own.explanation]
    notes = plan_text.list_notes(config)
    return [*lines, "", *notes] if notes else lines


def _format_order(config: Config, layouts: Sequence[LayoutCandidate]) -> str:
    if not any(layout.fits for layout in layouts):
        return "none fits; least memory first:"
    if layouts[0].step_s is not None:
        return "by step time, fastest first:"
    return (
        f"not ranked by speed, since step times on {config.hardware.name} are unknown; least "
        "memory first, which is often the slowest:"
    )


def _format_equal_layouts(layouts: Sequence[LayoutCandidate]) -> list[str]:
    """Return a line with the number of layouts that are as fast as the first one."""
    if (count := count_equal_layouts(layouts)) < 2:
        return []
    return [f"the first {format_count(count)} are equal within the 80% intervals of their times"]
