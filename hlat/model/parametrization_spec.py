"""Parametrizations: how the model and its initial values depend on width and depth, without torch.

A parametrization transfers settings that are tuned for a small model, the base, to wider and deeper
ones. The settings of a run are those of the base; the rules here and in hlat.optim.parametrization
scale them by the ratios of width and depth. docs/parametrization.md has the table with sources.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from hlat.config.bounds import bounded

if TYPE_CHECKING:
    from hlat.config.model import ModelConfig


class ParametrizationName(Enum):
    """Rules by which settings depend on width and depth."""

    standard = "standard"
    """None: the settings are those of the model."""
    mup = "mup"
    """Maximal update parametrization: transfer over width (arXiv 2203.03466)."""
    completep = "completep"
    """CompleteP: transfer over width and depth (arXiv 2505.01618, alpha = 1)."""


@dataclass
class ParametrizationConfig:
    """Rules for width and depth, and the size of the base, for which the settings are tuned."""

    name: ParametrizationName = ParametrizationName.standard
    """Rules: standard, mup or completep."""
    base_width: int | None = bounded(None, min=1)
    """model.hidden_size of the base; mup and completep need it."""
    base_depth: int | None = bounded(None, min=1)
    """model.num_layers of the base; completep needs it."""
    base_head_dim: int | None = bounded(None, min=1)
    """Size of an attention head of the base; null: that of the model, so that wider models have
    more heads."""


def find_conflicts(model: ModelConfig) -> Iterator[str]:
    """Yield a message for each size of the base that the rules need or do not read."""
    settings = model.parametrization
    is_scaled = settings.name is not ParametrizationName.standard
    needs = {
        "base_width": (is_scaled, "hidden_size"),
        "base_depth": (settings.name is ParametrizationName.completep, "num_layers"),
        "base_head_dim": (is_scaled, None),
    }
    prefix = "model.parametrization"
    for key, (is_read, size) in needs.items():
        value = getattr(settings, key)
        if is_read and size is not None and value is None:
            yield (
                f"parametrization={settings.name.value} needs {prefix}.{key}, which is null; set "
                f"it to the model.{size} for which the settings were tuned (this model has "
                f"{getattr(model, size)})"
            )
        if not is_read and value is not None:
            yield (
                f"parametrization={settings.name.value} does not read {prefix}.{key}={value}; "
                f"use {prefix}.{key}=null"
            )


def compute_width_ratio(model: ModelConfig) -> float:
    """Return the width relative to the base, m_N; 1 without a base."""
    return model.hidden_size / (model.parametrization.base_width or model.hidden_size)


def compute_depth_ratio(model: ModelConfig) -> float:
    """Return the number of layers relative to the base, m_L; 1 without a base."""
    return model.num_layers / (model.parametrization.base_depth or model.num_layers)


def compute_attention_scale(model: ModelConfig) -> float:
    """Return the factor of the attention scores.

    Without model.attention.scale it is 1 / sqrt(d). With a base it is sqrt(base d) / d: muP's 1 / d
    that equals 1 / sqrt(d) at the base (arXiv 2203.03466, definition 4.1).
    """
    settings, head_dim = model.parametrization, model.head_dim
    base_dim = settings.base_head_dim or head_dim
    scale = model.attention.scale or base_dim**-0.5
    return scale if base_dim == head_dim else scale * base_dim / head_dim


def compute_residual_multiplier(model: ModelConfig) -> float:
    """Return the factor of the outputs of attention and MLP: that of the model over m_L."""
    return model.residual_multiplier / compute_depth_ratio(model)


def compute_output_multiplier(model: ModelConfig) -> float:
    """Return the factor of the hidden states that the output head reads, 1 / m_N."""
    return 1 / compute_width_ratio(model)
