"""The two runs whose uptime the HLAT paper tells, number by number with where each comes from.

The paper gives the two uptimes (section IV-B) and nothing that they follow from. Everything is the
same in both scenarios but what happens between a failure and the restart; `mtbf_h` alone is fitted,
and only to the first uptime, so that the second one tests it. docs/failures.md weighs the rest.
"""

import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple

from hlat.config.errors import ConfigError
from hlat.planning.failures import Scenario


class Given(NamedTuple):
    """A number and where it comes from."""

    value: float
    source: str


PUBLISHED_UPTIME = {"manual": 0.7783, "automatic": 0.9881}
"""HLAT paper, section IV-B."""

_SAME = {
    "nodes": Given(64, "HLAT-7B, slides; assumed of the 600 B tokens too"),
    "mtbf_h": Given(2950, "fitted to 77.83% of scenario=manual"),
    "restart_s": Given(420, "assumed: processes, checks, compiled graphs from the cache"),
    "load_s": Given(180, "assumed: from shared storage"),
    "save_stall_s": Given(60, "assumed: training waits for the whole save"),
    "save_write_s": Given(0, "HLAT's script for 7B: synchronous, written when training goes on"),
    "step_s": Given(3.303, "4,194,304 tokens at 1.27 M/s: MFU 27.9% on 64 nodes, slide 36"),
    "every_steps": Given(1000, "HLAT's script for 7B"),
}

SCENARIOS = {
    "manual": {
        **_SAME,
        "detect_s": Given(0, "part of the response"),
        "response_s": Given(
            46_500, "assumed: 12.4 h until somebody works, Monday to Friday 8 to 20 h; 0.5 h to act"
        ),
        "steps": Given(143_051, "600 B tokens, paper section IV-B"),
    },
    "automatic": {
        **_SAME,
        "detect_s": Given(600, "assumed: at once, or in 15% after the script's time-out of 4000 s"),
        "response_s": Given(600, "assumed: the node is replaced"),
        "steps": Given(429_153, "1.8 T tokens"),
    },
}
"""Every field of `hlat.planning.failures.Scenario`."""


def compose(name: str, given: Mapping[str, float]) -> tuple[Scenario, dict[str, str]]:
    """Return a scenario with some of its numbers given, and where each of its numbers comes from.

    Raises:
        ConfigError: There is no scenario of that name.
    """
    if name not in SCENARIOS:
        near = difflib.get_close_matches(name, SCENARIOS, 1)
        hint = f"did you mean {near[0]}?" if near else f"choices: {', '.join(SCENARIOS)}"
        raise ConfigError(f"scenario={name} does not exist; {hint}")
    numbers = SCENARIOS[name] | {key: Given(value, "given") for key, value in given.items()}
    settings: dict[str, Any] = {key: number.value for key, number in numbers.items()}
    return Scenario(**settings), {key: number.source for key, number in numbers.items()}
