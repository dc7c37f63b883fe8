"""Capabilities of the engines: the settings that each one supports (engine_capabilities.yaml).

Validation, its error messages, the planner, the engines and docs/reference/engine-capabilities.md
use this table.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from fnmatch import fnmatchcase
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml

from hlat.config.conditions import are_met, resolve_references
from hlat.config.config_errors import ConfigError, raise_config_errors
from hlat.config.engine import EngineBackend
from hlat.config.run import Config
from hlat.config.yaml_loader import YAML_LOADER
from hlat.model.mlp_spec import get_mlp_spec

STOCHASTIC_ROUNDING_DEVICES = frozenset({"neuron", "xla"})
"""Torch device types with stochastic rounding in hardware, enabled by
NEURON_RT_STOCHASTIC_ROUNDING_EN (see hlat/engine/neuron). On other devices it is emulated."""


@dataclass(frozen=True)
class Limit:
    """A limit of an engine on one or more settings."""

    keys: list[str]
    """Configuration keys, in the order in which messages show their values."""
    supported: str
    """Supported values, for the documentation."""
    reason: str
    """Reason for the limit."""
    remedy: str
    """Values to set instead."""
    refused: dict[str, Any] | list[dict[str, Any]]
    """Conditions on keys (hlat.config.conditions), or a list of alternatives."""

    def is_met(self, config: Config, device_type: str | None = None) -> bool:
        """Return True if the engine supports the settings, with a torch device type if known."""
        alternatives = self.refused if isinstance(self.refused, list) else [self.refused]
        return not any(
            are_met(conditions, lambda key: _get_value(config, key, device_type))
            for conditions in alternatives
        )

    def format_violation(
        self, config: Config, engine: EngineBackend, subject: str | None = None
    ) -> str:
        """Return the error message for unsupported settings, and a subject used with them."""
        values = [f"{key}={_format_value(attrgetter(key)(config))}" for key in self.keys]
        remedy = resolve_references(self.remedy, lambda key: _get_value(config, key))
        return (
            f"{' with '.join([subject, *values] if subject else values)} is not supported by "
            f"engine={engine.value}: {self.reason}; {remedy}"
        )


@dataclass(frozen=True)
class EngineCapabilities:
    """Limits and properties of one engine."""

    compiles_ahead: bool
    """True if `hlat precompile` can compile the graphs of a run before it."""
    shares_node: bool
    """True if several runs can share the accelerators of a node."""
    component_settings: list[str]
    """Patterns of settings of components, without `model.`, that may differ from the default."""
    layout_limits: tuple[Limit, ...]
    """Limits on model, layout and precision recipe, which the planner checks too."""
    other_limits: tuple[Limit, ...]
    """Limits on device, compiler and environment."""
    decoding_limits: tuple[Limit, ...]
    """Limits on decoding: probes, and evaluations of texts."""
    device_limits: tuple[Limit, ...]
    """Limits on settings with the device that a process finds."""


def _load_capabilities() -> dict[EngineBackend, EngineCapabilities]:
    text = Path(__file__).with_suffix(".yaml").read_text("utf-8")
    table = yaml.load(text, Loader=YAML_LOADER)  # noqa: S506 (is safe)
    for capabilities in table.values():
        for key in capabilities:
            if key.endswith("_limits"):
                capabilities[key] = tuple(Limit(**row) for row in capabilities[key])
    return {engine: EngineCapabilities(**table[engine.value]) for engine in EngineBackend}


def _get_value(config: Config, key: str, device_type: str | None = None) -> Any:
    """Return the value of a key as in YAML, or a derived value that the YAML file refers to."""
    if key == "hardware_rounds":
        return device_type in STOCHASTIC_ROUNDING_DEVICES
    if key == "has_experts":
        return get_mlp_spec(config.model).count_experts(config.model) > 0
    if key == "padded_vocab_size":
        tp = max(1, config.parallelism.tp)
        return -(-config.model.vocab_size // tp) * tp
    value = attrgetter(key)(config)
    return value.value if isinstance(value, Enum) else value


ENGINE_CAPABILITIES = _load_capabilities()


def find_unsupported_settings(config: Config) -> Iterator[str]:
    """Yield an error message for each limit of the configured engine that the run violates."""
    engine = config.engine.name
    capabilities = ENGINE_CAPABILITIES[engine]
    for limit in capabilities.layout_limits + capabilities.other_limits:
        if not limit.is_met(config):
            yield limit.format_violation(config, engine)
    yield from find_unsupported_components(config, engine)
    if config.evaluation.probes:
        probes = f"evaluation.probes={_format_value(config.evaluation.probes)}"
        yield from _find_decoding_violations(config, probes)
    if config.evaluation.samples.prompts:
        yield from _find_decoding_violations(config, "evaluation.samples.prompts")


def find_unsupported_components(config: Config, engine: EngineBackend) -> Iterator[str]:
    """Yield an error message for each setting of a component that an engine does not support."""
    patterns, default = ENGINE_CAPABILITIES[engine].component_settings, type(config.model)()
    for component in fields(default):
        section = getattr(config.model, component.name)
        settings = fields(section) if is_dataclass(section) else ()
        for name in (setting.name for setting in settings):
            key, value = f"{component.name}.{name}", getattr(section, name)
            usual = getattr(getattr(default, component.name), name)
            if value != usual and not any(fnmatchcase(key, pattern) for pattern in patterns):
                yield (
                    f"model.{key}={_format_value(value)} is not supported by engine={engine.value}"
                    f": it has the components of Llama; use engine=native, or set model.{key}="
                    f"{_format_value(usual)}"
                )


def validate_decoding(config: Config) -> None:
    """Raise ConfigError if the configured engine cannot decode with the configured layout."""
    raise_config_errors(_find_decoding_violations(config, "decoding"))


def validate_device(config: Config, device_type: str) -> None:
    """Raise ConfigError if the configured engine does not support the run on a type of device."""
    engine = config.engine.name
    for limit in ENGINE_CAPABILITIES[engine].device_limits:
        if not limit.is_met(config, device_type):
            raise ConfigError(limit.format_violation(config, engine, f"device {device_type}"))


def _find_decoding_violations(config: Config, subject: str) -> Iterator[str]:
    engine = config.engine.name
    for limit in ENGINE_CAPABILITIES[engine].decoding_limits:
        if not limit.is_met(config):
            yield limit.format_violation(config, engine, subject)


def _format_value(value: Any) -> str:
    """Return a value as it is written in an override."""
    if isinstance(value, Enum | str):
        return str(value.value) if isinstance(value, Enum) else value
    if isinstance(value, list):
        return f"[{','.join(map(_format_value, value))}]"
    return ", ".join(value) if isinstance(value, dict) else json.dumps(value)
