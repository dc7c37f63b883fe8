"""Scenarios of the two runs whose uptime the HLAT paper reports, with the source of each value.

The paper reports only the uptimes (section IV-B). The scenarios differ only in the time between a
failure and the restart; `mtbf_h` is fitted to the first uptime, so the second is a test.
docs/failures.md discusses the other values.
"""

import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple

from hlat.config.config_errors import ConfigError
from hlat.plan.failure_model import FailureScenario


class SourcedValue(NamedTuple):
    """Value and its source."""

    value: float
    source: str


PUBLISHED_UPTIME = {"manual": 0.7783, "automatic": 0.9881}
"""HLAT paper, section IV-B."""

_COMMON_VALUES = {
    "nodes": SourcedValue(64, "HLAT-7B, slides; assumed for the 600 B tokens too"),
    "mtbf_h": SourcedValue(2950, "fitted to 77.83% of scenario=manual"),
    "restart_s": SourcedValue(420, "assumed: processes, checks, compiled graphs from the cache"),
    "load_s": SourcedValue(180, "assumed: from shared storage"),
    "save_stall_s": SourcedValue(60, "assumed: saves block training"),
    "save_write_s": SourcedValue(
        0, "HLAT's script for 7B: synchronous, durable when training continues"
    ),
    "step_s": SourcedValue(3.303, "4,194,304 tokens at 1.27 M/s: MFU 27.9% on 64 nodes, slide 36"),
    "every_steps": SourcedValue(1000, "HLAT's script for 7B"),
}

SCENARIOS = {
    "manual": {
        **_COMMON_VALUES,
        "detect_s": SourcedValue(0, "part of the response"),
        "response_s": SourcedValue(
            46_500, "assumed: 12.4 h until working hours, Monday to Friday 8 to 20 h; 0.5 h to act"
        ),
        "steps": SourcedValue(143_051, "600 B tokens, paper section IV-B"),
    },
    "automatic": {
        **_COMMON_VALUES,
        "detect_s": SourcedValue(
            600, "assumed: at once, or in 15% after the script's time-out of 4000 s"
        ),
        "response_s": SourcedValue(600, "assumed: the node is replaced"),
        "steps": SourcedValue(429_153, "1.8 T tokens"),
    },
}
"""Every field of `hlat.plan.failure_model.Scenario`."""


def build_scenario(
    name: str, overrides: Mapping[str, float]
) -> tuple[FailureScenario, dict[str, str]]:
    """Return a scenario with overridden values, and the source of each value.

    Raises:
        ConfigError: If the scenario does not exist.
    """
    if name not in SCENARIOS:
        near = difflib.get_close_matches(name, SCENARIOS, 1)
        hint = f"did you mean {near[0]}?" if near else f"choices: {', '.join(SCENARIOS)}"
        raise ConfigError(f"scenario={name} does not exist; {hint}")
    numbers = SCENARIOS[name] | {
        key: SourcedValue(value, "given") for key, value in overrides.items()
    }
    settings: dict[str, Any] = {key: number.value for key, number in numbers.items()}
    return FailureScenario(**settings), {key: number.source for key, number in numbers.items()}
