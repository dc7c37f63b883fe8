"""Capabilities of the engines: the settings that each one supports, and the reason for each limit.

Validation, its error messages, the planner, the engines and the table in docs/neuron.md use these
tables.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Any

from hlat.config.config_errors import ConfigError
from hlat.config.engine import EngineBackend
from hlat.config.parallelism import PipelineSchedule
from hlat.config.precision import RoundingMode
from hlat.config.run import Config

STOCHASTIC_ROUNDING_DEVICES = frozenset({"neuron", "xla"})
"""Torch device types with stochastic rounding in hardware, enabled by
NEURON_RT_STOCHASTIC_ROUNDING_EN (see hlat.neuron_environment). On other devices it is emulated."""


@dataclass(frozen=True)
class Limit:
    """A limit of an engine on one or more settings."""

    keys: tuple[str, ...]
    """Configuration keys, in the order in which messages show their values."""
    supported: str
    """Supported values, for the documentation."""
    reason: str
    """Reason for the limit."""
    remedy: str | Callable[[Config], str]
    """Values to set instead."""
    is_met: Callable[..., bool]
    """Return True if the engine supports the settings, given the configuration; a limit of
    `device_limits` is also given the torch device type."""

    def format_violation(
        self, config: Config, engine: EngineBackend, subject: str | None = None
    ) -> str:
        """Return the error message for unsupported settings, and a subject used with them."""
        values = [f"{key}={_format_value(attrgetter(key)(config))}" for key in self.keys]
        remedy = self.remedy if isinstance(self.remedy, str) else self.remedy(config)
        return (
            f"{' with '.join([subject, *values] if subject else values)} is not supported by "
            f"engine={engine.value}: {self.reason}; {remedy}"
        )


@dataclass(frozen=True)
class EngineCapabilities:
    """Limits and properties of one engine."""

    layout_limits: tuple[Limit, ...]
    """Limits on model, layout and precision recipe, which the planner checks too."""
    other_limits: tuple[Limit, ...]
    """Limits on device, compiler and environment."""
    decoding_limits: tuple[Limit, ...]
    """Limits on decoding: probes, and evaluations of texts."""
    device_limits: tuple[Limit, ...]
    """Limits on settings with the device that a process finds."""
    compiles_ahead: bool
    """True if `hlat.precompile` can compile the graphs of a run before it."""
    shares_node: bool
    """True if several runs can share the accelerators of a node."""

    @property
    def limits(self) -> tuple[Limit, ...]:
        """All limits."""
        return self.layout_limits + self.other_limits + self.decoding_limits + self.device_limits


def _accumulates_to_nearest(config: Config) -> bool:
    is_same_dtype = config.precision.accumulation is config.precision.gradients
    return is_same_dtype and not _is_stochastic(config)


def _is_zero_bubble(config: Config) -> bool:
    return config.parallelism.pipeline_schedule is PipelineSchedule.zero_bubble


def _is_stochastic(config: Config) -> bool:
    return config.precision.rounding is RoundingMode.stochastic


def _has_nxd_training(config: Config) -> bool:
    """Return True unless the pinned SDK is newer than 2.31, the last with NxD training."""
    release = (config.compiler.neuron_sdk or "").split(".")[:2]
    return not all(part.isdecimal() for part in release) or tuple(map(int, release)) <= (2, 31)


def _round_up_vocab_size(config: Config) -> str:
    tp = config.parallelism.tp
    fitting = -(-config.model.vocab_size // tp) * tp
    return f"set model.vocab_size={fitting}, or use engine=native"


_NATIVE = EngineCapabilities(
    layout_limits=(
        Limit(
            ("parallelism.zero", "precision.rounding", "precision.master_weights"),
            "zero 0 or 1 for stochastic rounding of master weights",
            "FSDP2 rounds master weights to nearest",
            "use parallelism.zero=1",
            lambda c: (
                c.parallelism.zero < 2
                or not _is_stochastic(c)
                or c.precision.master_weights is None
            ),
        ),
        Limit(
            ("parallelism.zero", "parallelism.pipeline_schedule"),
            "zero 0 or 1 for zero_bubble",
            "FSDP2 reduces gradients after the backward pass of each layer, before the deferred "
            "weight gradients",
            "use interleaved, or parallelism.zero=1",
            lambda c: c.parallelism.zero < 2 or not _is_zero_bubble(c),
        ),
        Limit(
            ("parallelism.pipeline_schedule", "precision.name"),
            "zero_bubble for recipes that accumulate in the gradients' dtype, rounded to nearest",
            "the zero-bubble schedule accumulates gradients in their dtype, rounded to nearest",
            "use interleaved",
            lambda c: not _is_zero_bubble(c) or _accumulates_to_nearest(c),
        ),
        Limit(
            ("model.tie_embeddings", "parallelism.pp"),
            "tied embeddings for pp=1",
            "the first and the last stage need the embedding",
            "use parallelism.pp=1",
            lambda c: not c.model.tie_embeddings or c.parallelism.pp <= 1,
        ),
    ),
    other_limits=(
        Limit(
            ("precision.copies_drift",),
            "false",
            "all replicas of a weight are bitwise equal",
            "set it to false",
            lambda c: not c.precision.copies_drift,
        ),
    ),
    decoding_limits=(
        Limit(
            ("parallelism.zero",),
            "probes and decoding for zero 0 or 1",
            "decoding needs unsharded layers on a data-parallel rank",
            "use parallelism.zero=1 or 0, any checkpoint fits",
            lambda c: c.parallelism.zero < 2,
        ),
    ),
    device_limits=(
        Limit(
            ("precision.rounding", "compiler.neuron_sdk"),
            "stochastic rounding on Trainium with a pinned SDK",
            "the hardware rounds, in the mode that the environment of a pinned SDK sets",
            "use compiler=neuron_2_33 or another pin",
            lambda c, device_type: (
                not _is_stochastic(c)
                or device_type not in STOCHASTIC_ROUNDING_DEVICES
                or c.compiler.neuron_sdk is not None
            ),
        ),
    ),
    compiles_ahead=False,
    shares_node=True,
)

_NXD = EngineCapabilities(
    layout_limits=(
        Limit(
            ("parallelism.zero",),
            "0 or 1",
            "NxD implements ZeRO-1 only",
            "use 0 or 1, or engine=native",
            lambda c: c.parallelism.zero < 2,
        ),
        Limit(
            ("parallelism.pipeline_schedule",),
            "one_f_one_b",
            "the evaluation hangs in NxD with other schedules",
            "use one_f_one_b, or engine=native",
            lambda c: c.parallelism.pipeline_schedule is PipelineSchedule.one_f_one_b,
        ),
        Limit(
            ("model.tie_embeddings",),
            "false",
            "the output head has its own weights",
            "use engine=native, or false",
            lambda c: not c.model.tie_embeddings,
        ),
        Limit(
            ("parallelism.tp", "model.vocab_size"),
            "tp divides vocab_size",
            "NxD's embedding shards the vocabulary evenly",
            _round_up_vocab_size,
            lambda c: c.parallelism.tp < 1 or c.model.vocab_size % c.parallelism.tp == 0,
        ),
        Limit(
            ("data.document_mask",),
            "false",
            "NxD's pipeline passes no attention mask, so the causal mask is a constant",
            "set it to false, or use engine=native",
            lambda c: not c.data.document_mask,
        ),
        Limit(
            ("parallelism.zero", "precision.name"),
            "zero 1 for recipes with master weights or wider accumulation",
            "only NxD's ZeRO-1 optimizer has master weights and a separate accumulation dtype",
            "set parallelism.zero=1",
            lambda c: (
                c.parallelism.zero > 0
                or {c.precision.accumulation, c.precision.master_weights}
                <= {c.precision.weights, None}
            ),
        ),
        Limit(
            ("precision.accumulation", "precision.reduction"),
            "the same dtype",
            "NxD accumulates over micro batches and reduces over ranks in one dtype",
            "set both to the same dtype",
            lambda c: c.precision.accumulation is c.precision.reduction,
        ),
        Limit(
            ("precision.copies_drift", "precision.rounding"),
            "copies_drift for stochastic rounding",
            "replicas differ under stochastic rounding only",
            "set precision.copies_drift=false",
            lambda c: not c.precision.copies_drift or _is_stochastic(c),
        ),
    ),
    other_limits=(
        Limit(
            ("compiler.inductor",),
            "false",
            "TorchInductor does not compile for PyTorch/XLA",
            "set it to false, or use engine=native",
            lambda c: not c.compiler.inductor,
        ),
        Limit(
            ("engine.device",),
            "xla or auto",
            "NxD runs on PyTorch/XLA's device only",
            "use xla",
            lambda c: c.engine.device in ("xla", "auto"),
        ),
        Limit(
            ("precision.rounding", "compiler.neuron_sdk"),
            "stochastic rounding with a pinned SDK",
            "the hardware rounds, in the mode that the environment of a pinned SDK sets",
            "use compiler=neuron_2_28 or another pin",
            lambda c: not _is_stochastic(c) or c.compiler.neuron_sdk is not None,
        ),
        Limit(
            ("compiler.neuron_sdk",),
            "2.31 or older",
            "Neuron ended PyTorch/XLA training in SDK 2.32 (its announcements)",
            "use compiler=neuron_2_28, or engine=native on trn2",
            _has_nxd_training,
        ),
    ),
    decoding_limits=(
        Limit(
            (),
            "no probes and no decoding",
            "each text length would compile a graph",
            "evaluate checkpoints with hlat evaluate and engine=native",
            lambda c: False,
        ),
    ),
    device_limits=(
        Limit(
            ("precision.rounding",),
            "stochastic rounding on Trainium",
            "the hardware rounds",
            "use engine=native, which rounds by itself, or precision=mixed",
            lambda c, device_type: (
                not _is_stochastic(c) or device_type in STOCHASTIC_ROUNDING_DEVICES
            ),
        ),
    ),
    compiles_ahead=True,
    shares_node=False,
)

ENGINE_CAPABILITIES = {EngineBackend.native: _NATIVE, EngineBackend.nxd: _NXD}


def find_unsupported_settings(config: Config) -> Iterator[str]:
    """Yield an error message for each limit of the configured engine that the run violates."""
    engine = config.engine.name
    capabilities = ENGINE_CAPABILITIES[engine]
    for limit in capabilities.layout_limits + capabilities.other_limits:
        if not limit.is_met(config):
            yield limit.format_violation(config, engine)
    if config.evaluation.probes:
        probes = f"evaluation.probes={_format_value(config.evaluation.probes)}"
        yield from _find_decoding_violations(config, probes)


def validate_decoding(config: Config) -> None:
    """Raise ConfigError if the configured engine cannot decode with the configured layout."""
    if problems := [*_find_decoding_violations(config, "decoding")]:
        raise ConfigError(*problems)


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


def format_capabilities_table() -> str:
    """Return all limits as a Markdown table."""
    rows = ["| engine | settings | supported | reason |", "|---|---|---|---|"]
    for engine, capabilities in ENGINE_CAPABILITIES.items():
        rows += [
            f"| {engine.value} | {', '.join(f'`{key}`' for key in limit.keys) or 'decoding'} "
            f"| {limit.supported} | {limit.reason} |"
            for limit in capabilities.limits
        ]
    return "\n".join(rows) + "\n"


def _format_value(value: Any) -> str:
    """Return a value as it is written in an override."""
    if isinstance(value, Enum | str):
        return str(value.value) if isinstance(value, Enum) else value
    return ", ".join(value) if isinstance(value, dict) else json.dumps(value)
