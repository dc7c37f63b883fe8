"""Scenarios of the two runs whose uptime the HLAT paper reports (failure_scenarios.yaml)."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hlat.config.config_errors import ConfigError
from hlat.config.untrusted_files import load_untrusted_yaml
from hlat.plan.failure_model import FailureScenario

PUBLISHED_UPTIME = {"manual": 0.7783, "automatic": 0.9881}
"""HLAT paper, section IV-B."""
_TABLES: dict[str, dict[str, Any]] = load_untrusted_yaml(Path(__file__).with_suffix(".yaml"))
SCENARIOS = {name: _TABLES["common"] | _TABLES[name] for name in PUBLISHED_UPTIME}
"""Value and source of every field of `FailureScenario`, by scenario."""


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
    numbers = SCENARIOS[name] | {key: (value, "given") for key, value in overrides.items()}
    scenario = FailureScenario(**{key: value for key, (value, _) in numbers.items()})
    return scenario, {key: source for key, (_, source) in numbers.items()}
