"""Specification of the rotary position embedding: settings and layers, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from hlat.config.bounds import bounded
from hlat.model.activation_spec import (
    ActivationLifetime,
    ActivationTensor,
    ExecutionSettings,
    ParallelRegion,
)

if TYPE_CHECKING:
    from hlat.config.model import ModelConfig


class RopeScaling(Enum):
    """Change of the rotary frequencies for sequences that are longer than the original ones."""

    none = "none"
    """theta^(-2 i / d)."""
    linear = "linear"
    """Divided by factor (arXiv 2306.15595)."""
    dynamic = "dynamic"
    """NTK-aware base that grows with the length beyond original_max_positions."""
    llama3 = "llama3"
    """Low frequencies divided by factor, smooth transition to the high ones (Llama 3.1)."""
    yarn = "yarn"
    """Interpolation by frequency, and a factor of queries and keys (arXiv 2309.00071)."""


@dataclass
class RopeConfig:
    """Rotary position embedding (arXiv 2104.09864); the base is model.rope_theta."""

    scaling: RopeScaling = RopeScaling.none
    """Change of the frequencies."""
    factor: float = bounded(1.0, min=1, below=float("inf"))
    """Factor of the scaling: how many times longer sequences are than the original ones."""
    original_max_positions: int | None = bounded(None, min=1)
    """Positions that the model was trained with before scaling; required by dynamic, llama3 and
    yarn."""
    low_freq_factor: float = bounded(1.0, above=0, below=float("inf"))
    """llama3: wavelengths above original_max_positions / low_freq_factor are divided by factor."""
    high_freq_factor: float = bounded(4.0, above=0, below=float("inf"))
    """llama3: wavelengths below original_max_positions / high_freq_factor do not change."""
    beta_fast: float = bounded(32.0, above=0, below=float("inf"))
    """yarn: dimensions with more rotations than this do not change."""
    beta_slow: float = bounded(1.0, above=0, below=float("inf"))
    """yarn: dimensions with fewer rotations than this are divided by factor."""
    attention_factor: float | None = bounded(None, above=0, below=float("inf"))
    """yarn: factor of cosine and sine; null: 0.1 ln(factor) + 1."""
    truncate: bool = True
    """yarn: round the limits of the transition to whole dimensions."""
    partial_rotary_factor: float = bounded(1.0, above=0, max=1)
    """Part of each head that rotates, from its start."""
    sliding_theta: float | None = bounded(None, above=0, below=float("inf"))
    """Base in sliding layers, with frequencies that are not scaled; null: as in other layers."""
    layer_pattern: list[bool] = field(default_factory=list)
    """Layers with rotary embedding, repeated over the layers, such as [true,true,true,false]
    (SmolLM3, NoPE of arXiv 2305.19466); empty: all."""


def find_conflicts(model: ModelConfig) -> Iterator[str]:
    """Yield an error message for each pair of settings that conflict."""
    rope, scaling = model.rope, model.rope.scaling
    dim = get_rotary_dim(model)
    if (dim % 2 or dim == 0) and model.hidden_size % model.num_attention_heads == 0:
        yield (
            f"a head size of {model.head_dim} x model.rope.partial_rotary_factor="
            f"{rope.partial_rotary_factor:g} is {dim}, and the rotary embedding needs an even "
            "number of elements; change model.num_attention_heads or model.attention.head_dim"
        )
    if scaling is RopeScaling.none and rope.factor != 1:
        yield (
            f"model.rope.factor={rope.factor:g} has no effect with model.rope.scaling=none; use 1, "
            "or linear, dynamic, llama3 or yarn"
        )
    needs_original = scaling not in (RopeScaling.none, RopeScaling.linear)
    if needs_original and rope.original_max_positions is None:
        yield (
            f"model.rope.scaling={scaling.value} needs model.rope.original_max_positions, which is "
            "null; set the sequence length of the training before scaling"
        )
    if scaling is RopeScaling.llama3 and rope.low_freq_factor >= rope.high_freq_factor:
        yield (
            f"model.rope.low_freq_factor={rope.low_freq_factor:g} is not below "
            f"model.rope.high_freq_factor={rope.high_freq_factor:g}; use 1 and 4"
        )


def has_rope(model: ModelConfig, layer: int) -> bool:
    """Return True if queries and keys of a 0-based decoder layer are rotated."""
    pattern = model.rope.layer_pattern
    return not pattern or pattern[layer % len(pattern)]


def get_rotary_dim(model: ModelConfig) -> int:
    """Return the number of elements of each head that rotate."""
    return int(model.head_dim * model.rope.partial_rotary_factor)


def list_shared_activations(
    model: ModelConfig, execution: ExecutionSettings
) -> tuple[ActivationTensor, ...]:
    """Return cosines and sines, which differ between sequences if positions start at documents."""
    num_bases = 1 if model.rope.sliding_theta is None else 2
    numel = 2 * num_bases * get_rotary_dim(model) if execution.has_documents else 0
    return (
        ActivationTensor(
            "cosines and sines", numel, ParallelRegion.tensor_parallel, ActivationLifetime.shared
        ),
    )
