"""The contestants and their common interface.

A contestant is a module with `open_trainer(settings)`, which returns a `Trainer`. Modules import
their libraries at the top, so that the memory of `open_trainer` excludes imports.
"""

import importlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hlat.config.compose import compose_config
from hlat.config.config_errors import ConfigError
from hlat.config.resolve import resolve_config
from hlat.config.run import Config

SMALL = ["num_layers=8", "hidden_size=256", "intermediate_size=704", "vocab_size=32000"]
LARGE_0_3B = [
    "num_layers=20",
    "hidden_size=1024",
    "intermediate_size=2816",
    "num_attention_heads=16",
    "num_key_value_heads=16",
]
LARGE_3B = [
    "num_layers=28",
    "hidden_size=3072",
    "intermediate_size=8192",
    "num_attention_heads=24",
    "num_key_value_heads=8",
]
MOE = ["num_layers=8", "hidden_size=256", "mlp.moe.intermediate_size=192", "vocab_size=8192"]
SHAPES = {
    "tiny": ["model=tiny"],
    "small": [
        "model=tiny",
        *(f"model.{setting}" for setting in SMALL),
        "batch.global_batch_size=4",
        "batch.micro_batch_size=4",
        "batch.sequence_length=512",
    ],
    "moe": [
        "model=qwen3_moe_tiny",
        *(f"model.{setting}" for setting in MOE),
        "batch.global_batch_size=4",
        "batch.micro_batch_size=4",
        "batch.sequence_length=512",
    ],
    "0.16b": [
        "model=160m",
        "batch.sequence_length=512",
        "batch.global_batch_size=1",
        "batch.micro_batch_size=1",
    ],
    "0.3b": [
        "model=160m",
        *(f"model.{setting}" for setting in LARGE_0_3B),
        "batch.sequence_length=2048",
        "batch.global_batch_size=16",
        "batch.micro_batch_size=16",
    ],
    "1b": [
        "model=1b",
        "batch.sequence_length=4096",
        "batch.global_batch_size=4",
        "batch.micro_batch_size=4",
    ],
    "3b": [
        "model=1b",
        *(f"model.{setting}" for setting in LARGE_3B),
        "batch.sequence_length=4096",
        "batch.global_batch_size=2",
        "batch.micro_batch_size=2",
    ],
}
"""Configuration overrides that define the shape of all contestants, with one micro batch. Other
shapes are presets of conf/model, with the batch of their configuration."""


@dataclass(frozen=True)
class Settings:
    """Contestant, shape and recipe of one benchmark process."""

    module: str
    shape: str
    recipe: str
    """Precision: fp32, bf16 (weights and optimizer too), mixed (bf16 compute, fp32 weights), or a
    recipe of hlat that peers do not have."""
    device: str = "cpu"
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the contestant; `environment` has variables of its process."""

    @property
    def compiled(self) -> bool:
        return bool(self.options.get("compiled", False))

    @property
    def overrides(self) -> list[str]:
        """Overrides of the run's configuration; modules of peers read `compiled` instead."""
        is_compiled = self.compiled and self.module == "ours"
        return [
            *SHAPES.get(self.shape, [f"model={self.shape}"]),
            f"precision={self.options.get('precision', self.recipe)}",
            f"compiler={'inductor' if is_compiled else 'none'}",
            f"engine.device={self.device}",
            f"engine.deterministic={str(self.options.get('deterministic', True)).lower()}",
            "parallelism=single",
        ]

    @cached_property
    def config(self) -> Config:
        """Return the resolved configuration of the run."""
        return resolve_config(compose_config(self.overrides))

    def tokens(self) -> NDArray[np.int32]:
        """Return the batch of all steps, [sequences, tokens]."""
        batch = self.config.batch
        size = (batch.global_batch_size, batch.sequence_length)
        generator = np.random.default_rng(self.config.run.seed)
        return generator.integers(0, self.config.model.vocab_size, size, np.int32)


class Trainer(Protocol):
    """Interface of the model and optimizer that `open_trainer` returns."""

    num_parameters: int

    def step(self) -> None:
        """Run forward, backward, clipping and update on the fixed batch; do not synchronize."""

    def loss(self) -> float | None:
        """Return the mean loss of the last step, before its update; None if nothing is trained."""


CONTESTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ours": ("ours", {}),
    "ours, compiled": ("ours", {"compiled": True}),
    "ours, compiled, nondeterministic": ("ours", {"compiled": True, "deterministic": False}),
    "ours, spinning 1000": ("ours", {"environment": {"GOMP_SPINCOUNT": "1000"}}),
    "ours, spinning 3000": ("ours", {"environment": {"GOMP_SPINCOUNT": "3000"}}),
    "ours, spinning 10000": ("ours", {"environment": {"GOMP_SPINCOUNT": "10000"}}),
    "ours, default malloc": ("ours", {"environment": {"GLIBC_TUNABLES": ""}}),
    "ours, bf16_sr": ("ours", {"precision": "bf16_sr"}),
    "ours, bf16_sr, compiled": ("ours", {"precision": "bf16_sr", "compiled": True}),
    "limit": ("limit", {}),
    "limit, operators": ("step_operators", {}),
    "plain": ("plain_model", {}),
    "plain, compiled": ("plain_model", {"compiled": True}),
    "transformers": ("hugging_face", {}),
    "transformers, compiled": ("hugging_face", {"compiled": True}),
    "litgpt": ("light", {}),
    "litgpt, compiled": ("light", {"compiled": True}),
    "torchtitan": ("titan", {}),
    "torchtitan, compiled": ("titan", {"compiled": True}),
}
"""Module and options by the name in tables."""


SPINNING = ("ours, spinning 1000", "ours, spinning 3000", "ours, spinning 10000")
OPTIONAL = (
    *SPINNING,
    "ours, default malloc",
    "ours, compiled, nondeterministic",
    "plain",
    "plain, compiled",
)
"""Contestants that only `run.py --exact` measures."""
FAMILIES = {
    "light": {"llama", "mistral", "qwen2", "qwen3", "olmo2", "gemma2", "gemma3"},
    "plain_model": {"llama"},
    "titan": {"llama", "qwen3", "qwen3_moe"},
}
"""Supported model families by module; the other modules support all."""
OTHER_MATHEMATICS = {("titan", "qwen3_moe", "fp32")}
"""Module, family and recipe of other mathematics: torchtitan's experts always compute in bf16."""


def list_contestants(shape: str, recipe: str) -> list[str]:
    """Return the names of the contestants that support the model of a shape in a recipe."""
    family = make_settings("ours", shape, "fp32", "cpu").config.model.family
    return [
        name
        for name, (module, options) in CONTESTANTS.items()
        if family in FAMILIES.get(module, {family})
        and (module, family, recipe) not in OTHER_MATHEMATICS
        and ("precision" not in options or recipe == "bf16")
        and is_valid(name, shape)
    ]


def is_valid(name: str, shape: str) -> bool:
    """Return True if hlat can compose the configuration: it refuses to compile some models."""
    try:
        make_settings(name, shape, "fp32", "cpu").config  # noqa: B018  evaluated once
    except ConfigError:
        return False
    return True


def make_settings(name: str, shape: str, recipe: str, device: str) -> Settings:
    """Return the settings of a contestant."""
    module, options = CONTESTANTS[name]
    return Settings(module, shape, recipe, device, options)


def load_module(settings: Settings) -> Any:
    """Import a contestant and its libraries."""
    return importlib.import_module(settings.module)
