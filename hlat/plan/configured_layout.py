"""Comparison of the configured layout with the first one of a search."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from hlat.config.config_errors import ConfigError
from hlat.config.run import Config
from hlat.plan.achieved_speed import get_efficiency
from hlat.plan.layout_search import LayoutCandidate
from hlat.plan.memory_estimate import estimate_memory, get_device_memory_bytes
from hlat.plan.plan_text import MEMORY_LABELS, TIME_LABELS, get_device_noun
from hlat.plan.step_time import predict_step_time
from hlat.tracking.text_format import format_duration, format_gib

_LEAST_DIFFERENCE = 0.0005
"""Relative difference of step times that is printed as a percentage other than 0.0%."""


@dataclass(frozen=True)
class ConfiguredLayout:
    """Configured layout, and a sentence that compares it with the first one of a search.

    `candidate` is None if the layout is invalid.
    """

    candidate: LayoutCandidate | None
    explanation: str


def evaluate_layout(config: Config) -> LayoutCandidate:
    """Return the memory and the step time of a valid layout."""
    memory = estimate_memory(config)
    try:
        step_s = predict_step_time(config).total
    except ConfigError:
        step_s = None
    return LayoutCandidate(config, memory, memory.total <= get_device_memory_bytes(config), step_s)


def explain_configured(
    config: Config, problems: Sequence[str], layouts: Sequence[LayoutCandidate]
) -> ConfiguredLayout:
    """Return the configured layout and the reason why it is not the first of a search.

    Args:
        config: Run, in its configured layout.
        problems: Rules that the layout violates.
        layouts: Result of `search_layouts`.
    """
    if problems:
        return ConfiguredLayout(None, f"the configured layout is invalid: {problems[0]}")
    own = evaluate_layout(config)
    first = layouts[0] if layouts and layouts[0].fits else None
    if not own.fits:
        return ConfiguredLayout(own, _explain_memory(own, first))
    if first is None or first.step_s is None or own.step_s is None:
        needed, available = (
            format_gib(size) for size in (own.memory.total, get_device_memory_bytes(config))
        )
        return ConfiguredLayout(
            own,
            f"the configured layout fits, with {needed} GiB of {available}; its step time is "
            "unknown",
        )
    return ConfiguredLayout(own, _explain_time(own, own.step_s, first, first.step_s))


def _explain_memory(own: LayoutCandidate, first: LayoutCandidate | None) -> str:
    """Return the memory that is missing, and the term that exceeds that of the first most."""
    needed, available = (
        format_gib(size) for size in (own.memory.total, get_device_memory_bytes(own.config))
    )
    terms = asdict(own.memory)
    others = dict.fromkeys(terms, 0.0) if first is None else asdict(first.memory)
    name = _find_largest_excess(terms, others)
    detail = f"{MEMORY_LABELS[name]} {format_gib(terms[name])} GiB"
    if first is not None:
        detail += f", {format_gib(others[name])} in the first layout"
    return (
        f"the configured layout does not fit: it needs {needed} GiB of each "
        f"{get_device_noun(own.config)}, which has {available}; {detail}"
    )


def _explain_time(
    own: LayoutCandidate, own_s: float, first: LayoutCandidate, first_s: float
) -> str:
    """Return how much slower a layout is, and the part of the step that causes most of it."""
    slower = own_s / first_s - 1
    if slower < _LEAST_DIFFERENCE:
        return "the configured layout is as fast as the first one"
    parts, others = (_get_parts(layout.config) for layout in (own, first))
    name = _find_largest_excess(parts, others)
    low, high = get_efficiency(own.config).layout_interval
    sentence = (
        f"the configured layout is {slower:.1%} slower than the first one: "
        f"{format_duration(parts[name])} of {TIME_LABELS[name]} a step, "
        f"{format_duration(others[name])} in the first"
    )
    if own_s * low <= first_s * high:
        return f"{sentence}. The intervals of both overlap: measure both"
    return sentence


def _get_parts(config: Config) -> dict[str, float]:
    parts = asdict(predict_step_time(config))
    return {name: seconds for name, seconds in parts.items() if name in TIME_LABELS}


def _find_largest_excess(terms: Mapping[str, float], others: Mapping[str, float]) -> str:
    return max(terms, key=lambda name: terms[name] - others[name])
