"""Specification of the decoder: all parameters, their initial values and FLOPs, without torch.

The decoder stacks the components in the files *_spec.py. Engines, planner, doctor and checkpoint
store read parameters from here and contain no name of a component.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from hlat.model import (
    attention_spec,
    embedding_spec,
    norm_spec,
    parametrization_spec,
    rope_spec,
)
from hlat.model.activation_spec import (
    ActivationLifetime,
    ActivationTensor,
    ExecutionSettings,
    ParallelRegion,
)
from hlat.model.attention_spec import get_attention_spec
from hlat.model.mlp_spec import (
    get_layer_mlp_kind,
    get_layer_mlp_spec,
    get_mlp_spec,
)
from hlat.model.parameter_spec import (
    BufferSpec,
    ModuleParameter,
    ParameterRole,
    ParameterSpec,
)

if TYPE_CHECKING:
    from hlat.config.model import ModelConfig


class ScaledInit(Enum):
    """Initialization of the output projections of attention and MLP (o_proj, down_proj)."""

    none = "none"
    """std, as for all other matrices."""
    depth = "depth"
    """std / sqrt(2 L), L = number of layers (the released HLAT scripts)."""
    layer = "layer"
    """std / sqrt(2 l), l = 1-based layer index (HLAT paper, section IV-C)."""


def find_conflicts(model: ModelConfig) -> Iterator[str]:
    """Yield an error message for each pair of settings of a component that conflict."""
    if min(model.hidden_size, model.num_attention_heads, model.num_key_value_heads) >= 1:
        yield from get_attention_spec(model).find_conflicts(model)
        yield from get_mlp_spec(model).find_conflicts(model)
        yield from rope_spec.find_conflicts(model)
        yield from parametrization_spec.find_conflicts(model)


def list_module_parameters(model: ModelConfig) -> tuple[ModuleParameter, ...]:
    """Return every parameter of decoder.Decoder in the order of the forward pass."""
    kinds = group_layers(model)
    parameters = {kind: list_layer_parameters(model, kind) for kind in set(kinds)}
    layers = (
        _move_to_layer(parameter, layer)
        for layer, kind in enumerate(kinds)
        for parameter in parameters[kind]
    )
    return (*list_input_parameters(model), *layers, *list_output_parameters(model))


def list_input_parameters(model: ModelConfig) -> tuple[ModuleParameter, ...]:
    """Return the parameters before the layers."""
    return (embedding_spec.build_embedding(model),)


def list_output_parameters(model: ModelConfig) -> tuple[ModuleParameter, ...]:
    """Return the parameters after the layers."""
    norm = (
        replace(one, specs=tuple(replace(spec, name=f"model.{spec.name}") for spec in one.specs))
        for one in norm_spec.list_norm_parameters(model, "norm")
    )
    head = embedding_spec.build_head(model)
    return (*norm, head) if head else (*norm,)


def list_layer_parameters(model: ModelConfig, layer: int) -> tuple[ModuleParameter, ...]:
    """Return the parameters of a layer, named without the layer, in the order of transformers.

    Norms before attention and MLP precede them, and norms after them follow.
    """
    names = norm_spec.NORM_NAMES[model.norm.placement]
    before_attention, after_attention, before_mlp, after_mlp = (
        norm_spec.list_norm_parameters(model, name) if name else () for name in names
    )
    return (
        *before_attention,
        *get_attention_spec(model).list_parameters(model),
        *after_attention,
        *before_mlp,
        *get_layer_mlp_spec(model, layer).list_parameters(model),
        *after_mlp,
    )


def list_parameter_specs(model: ModelConfig) -> tuple[ParameterSpec, ...]:
    """Return every canonical parameter in the order of the forward pass."""
    return tuple(spec for parameter in list_module_parameters(model) for spec in parameter.specs)


def list_buffer_specs(model: ModelConfig) -> tuple[BufferSpec, ...]:
    """Return every canonical buffer in the order of the layers."""
    return tuple(
        replace(spec, name=f"model.layers.{layer}.{spec.name}")
        for layer in range(model.num_layers)
        for spec in get_layer_mlp_spec(model, layer).list_buffers(model)
    )


def count_parameters(model: ModelConfig) -> int:
    """Return the number of weights of the full model; a tied head counts once."""
    return sum(spec.numel for spec in list_parameter_specs(model))


def count_active_parameters(model: ModelConfig) -> int:
    """Return the number of weights that are applied to a token."""
    return round(sum(spec.numel * spec.token_fraction for spec in list_parameter_specs(model)))


def list_copied_parameters(model: ModelConfig) -> tuple[ModuleParameter, ...]:
    """Return the parameters of the first pipeline stage of which the last stage has a copy."""
    return (embedding_spec.build_embedding(model),) if model.tie_embeddings else ()


def group_layers(model: ModelConfig) -> list[int]:
    """Return for each layer the first layer of the same kind, with equal parameters and cost."""
    first: dict[Hashable, int] = {}

    def get_kind(layer: int) -> Hashable:
        return (
            attention_spec.get_window(model, layer),
            rope_spec.has_rope(model, layer),
            get_layer_mlp_kind(model, layer),
        )

    return [first.setdefault(get_kind(layer), layer) for layer in range(model.num_layers)]


@dataclass(frozen=True)
class LayerFlops:
    """FLOPs of a layer for one token on a tensor-parallel rank, forward.

    Attributes:
        matrices: 2 per weight of a matrix.
        scores: Scores and weighted values, which selective checkpointing recomputes.
    """

    matrices: float
    scores: float

    @property
    def total(self) -> float:
        """FLOPs of the forward pass."""
        return self.matrices + self.scores


def compute_layer_flops(
    model: ModelConfig, layer: int, sequence_length: int, tp: int = 1
) -> LayerFlops:
    """Return the FLOPs of a layer for one token."""
    scores = get_attention_spec(model).compute_score_flops_per_token(model, layer, sequence_length)
    num_weights = sum(
        spec.compute_local_numel(tp) * spec.token_fraction
        for parameter in list_layer_parameters(model, layer)
        for spec in parameter.specs
        if len(spec.shape) == 2
    )
    return LayerFlops(2 * num_weights, scores / tp)


def compute_output_flops(model: ModelConfig, tp: int = 1) -> float:
    """Return the FLOPs of the output head for one token on a tensor-parallel rank, forward."""
    return 2 * -(-model.vocab_size // tp) * model.hidden_size


def compute_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Return the FLOPs of one training token, forward and backward.

    Three times those of the forward pass: 2 per weight of a matrix that is applied to the token,
    and those of attention, which counts the positions that a token attends to. The head counts
    once; embedding lookup and recomputation do not count. For Llama this is
    F = 3 [L (4 h^2 + 4 h h_kv + 6 h I + 2 s h) + 2 V h] with h_kv = key/value heads x head size,
    and reproduces the MFU figures that AWS Neuron
    publishes: 42.86 GF for 7B at 4096 tokens.

    Args:
        model: Model shape.
        sequence_length: Tokens per sequence, s.
    """
    layers = sum(
        count * compute_layer_flops(model, layer, sequence_length).total
        for layer, count in Counter(group_layers(model)).items()
    )
    return 3.0 * (layers + compute_output_flops(model))


def list_layer_activations(
    model: ModelConfig, layer: int, execution: ExecutionSettings
) -> tuple[ActivationTensor, ...]:
    """Return the activations of a layer."""
    return (
        ActivationTensor(
            "layer",
            model.hidden_size,
            ParallelRegion.sequence_parallel,
            ActivationLifetime.checkpoint,
        ),
        *norm_spec.list_activations(model, execution),
        *get_attention_spec(model).list_activations(model, layer, execution),
        *get_layer_mlp_spec(model, layer).list_activations(model, execution),
    )


def list_shared_activations(
    model: ModelConfig, execution: ExecutionSettings
) -> tuple[ActivationTensor, ...]:
    """Return the activations that all layers share."""
    return (
        *get_attention_spec(model).list_shared_activations(model, execution),
        *rope_spec.list_shared_activations(model, execution),
    )


def compute_init_std(parameter: ParameterSpec, model: ModelConfig) -> float:
    """Return the standard deviation of normal initial values.

    Sources: HLAT paper, section IV-C, for scaling by 1-based layer; the released HLAT scripts for
    scaling by depth. A parametrization divides the variance of hidden matrices by the width ratio,
    and CompleteP, whose residual multiplier depends on the depth, scales by that of the base.
    """
    std = model.init_std
    if parameter.role in (ParameterRole.matrix, ParameterRole.residual, ParameterRole.router):
        std *= parametrization_spec.compute_width_ratio(model) ** -0.5
    if parameter.role is not ParameterRole.residual or parameter.layer is None:
        return std
    if model.scaled_init is ScaledInit.depth:
        num_layers = model.parametrization.base_depth or model.num_layers
        return std * (1 / math.sqrt(2 * num_layers))
    if model.scaled_init is ScaledInit.layer:
        return std * (1 / math.sqrt(2 * (parameter.layer + 1)))
    return std


def _move_to_layer(parameter: ModuleParameter, layer: int) -> ModuleParameter:
    specs = (
        replace(spec, name=f"model.layers.{layer}.{spec.name}", layer=layer)
        for spec in parameter.specs
    )
    region = f"layers.{layer}.{parameter.region}" if parameter.region else None
    name = f"layers.{layer}.{parameter.name}"
    return replace(parameter, name=name, specs=tuple(specs), region=region)
