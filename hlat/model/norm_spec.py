"""Specification of RMSNorm and its placement in a decoder layer, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from hlat.config.components import get_spec, register_component
from hlat.model.activation_spec import ActivationTensor, ExecutionSettings, ParallelRegion
from hlat.model.parameter_spec import (
    Initialization,
    ModuleParameter,
    ParameterRole,
    ParameterSpec,
    ShardingRule,
)

if TYPE_CHECKING:
    from hlat.config.model import ModelConfig


class NormPlacement(Enum):
    """Norms around attention and MLP."""

    pre = "pre"
    """Before each (Llama)."""
    post = "post"
    """After each, before the residual addition (OLMo 2)."""
    sandwich = "sandwich"
    """Before and after each (Gemma 2)."""


@dataclass
class NormConfig:
    """Root mean square normalization (arXiv 1910.07467); epsilon is model.rms_norm_eps."""

    placement: NormPlacement = NormPlacement.pre
    """Norms around attention and MLP."""
    zero_centered: bool = False
    """Multiply by 1 + weight, with initial weights of 0 (Gemma), instead of by weight."""
    kind: str = "rms"
    """Kind of the norms over the hidden size: rms, or one of an extension."""


NORM_NAMES: dict[NormPlacement, tuple[str | None, str | None, str | None, str | None]] = {
    NormPlacement.pre: ("input_layernorm", None, "post_attention_layernorm", None),
    NormPlacement.post: (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    NormPlacement.sandwich: (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
"""Names of the norms before and after attention, then before and after the MLP (transformers)."""


def list_activations(
    model: ModelConfig, execution: ExecutionSettings
) -> tuple[ActivationTensor, ...]:
    """Return the inputs of the norms of one layer, which they save."""
    itemsize = 4 if execution.saves_fp32_norm_inputs else None
    return tuple(
        ActivationTensor(
            f"input of {name}",
            model.hidden_size,
            ParallelRegion.sequence_parallel,
            itemsize=itemsize,
        )
        for name in NORM_NAMES[model.norm.placement]
        if name
    )


class NormSpec:
    """Specification of RMSNorm; other kinds replace the method."""

    def list_parameters(self, model: ModelConfig, name: str) -> tuple[ModuleParameter, ...]:
        """Return the parameters of a norm over the hidden size, outside of tensor-parallel regions.

        Args:
            model: Shape and settings.
            name: Name of the module, such as `input_layernorm`.
        """
        init = Initialization.zeros if model.norm.zero_centered else Initialization.ones
        return (build_norm_parameter(model, f"{name}.weight", init),)


def build_norm_parameter(model: ModelConfig, name: str, init: Initialization) -> ModuleParameter:
    """Return a vector of the hidden size."""
    shape, role = (model.hidden_size,), ParameterRole.norm
    spec = ParameterSpec(name, shape, role, ShardingRule.replicated, init)
    return ModuleParameter(name, (spec,))


def list_norm_parameters(model: ModelConfig, name: str) -> tuple[ModuleParameter, ...]:
    """Return the parameters of a norm of the model's kind, given by the name of its module."""
    spec: NormSpec = get_spec("model.norm", model.norm.kind)
    return spec.list_parameters(model, name)


register_component("model.norm", "rms", "Root mean square normalization.", NormSpec())
