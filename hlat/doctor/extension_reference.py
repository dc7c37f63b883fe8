"""Components of extensions in the reference model: their modules in fp64 on one process.

A component of an extension has no second implementation. The reference runs its module with full
weights, so layouts, recipes, decoding and recomputation are compared with it; `backward_check`
compares its gradient with finite differences. All other parts remain those of `reference_model`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from hlat.config.components import get_component, get_implementation
from hlat.config.model import ModelConfig
from hlat.config.optimizer import OptimizerConfig
from hlat.config.run import Config
from hlat.doctor.reference_optimizer import Array, ReferenceState, ReferenceUpdate
from hlat.model.attention_kernels import KeyRange, compute_document_starts
from hlat.model.attention_spec import LayerType, get_attention_spec, get_layer_type
from hlat.model.auxiliary_loss import AuxiliaryLoss
from hlat.model.mlp_spec import get_layer_mlp_kind, get_layer_mlp_spec
from hlat.model.norm_spec import list_norm_parameters
from hlat.model.parameter_spec import ModuleParameter, ParameterRole
from hlat.model.parametrization_spec import ParametrizationName
from hlat.model.rope import compute_rope_cos_sin
from hlat.model.rope_spec import has_rope
from hlat.optim import optimizer_factory

SECTIONS = ("model.attention", "model.mlp", "model.norm")


def list_extended_sections(model: ModelConfig) -> list[str]:
    """Return the sections of the model whose component is that of an extension."""
    return [section for section in SECTIONS if is_extended(model, section)]


def is_extended(model: ModelConfig, section: str) -> bool:
    """Return True if the component of a section is not part of hlat."""
    kind = getattr(model, section.partition(".")[2]).kind
    implementation = get_component(section, kind).implementation
    # That of a component of hlat is None until its module is imported
    return implementation is not None and not implementation.__module__.startswith("hlat.")


def compute_attention(
    model: ModelConfig,
    weights: Mapping[str, Tensor],
    layer: int,
    x_BSH: Tensor,
    documents_BS: Tensor,
    positions_BS: Tensor,
) -> Tensor:
    """Return the output of the attention module of a layer; weights have canonical names."""
    with torch.device("meta"):
        module = get_implementation("model.attention", model.attention.kind)(model, layer, False)
    cos_sin, is_sliding = None, get_layer_type(model, layer) is LayerType.sliding
    if has_rope(model, layer):
        angles = torch.float64
        cos_sin = compute_rope_cos_sin(model, positions_BS, x_BSH.dtype, is_sliding, angles)
    key_range = KeyRange(compute_document_starts(documents_BS))
    parameters = get_attention_spec(model).list_parameters(model)
    return _call(module, "self_attn", parameters, weights, x_BSH, cos_sin, key_range)


def compute_mlp(
    model: ModelConfig,
    weights: Mapping[str, Tensor],
    layer: int,
    x_BSH: Tensor,
    losses: list[Tensor] | None,
) -> Tensor:
    """Return the output of the feed-forward module of a layer.

    Its auxiliary losses, summed over sequences, are appended to `losses`.
    """
    with torch.device("meta"):
        module = get_implementation("model.mlp", get_layer_mlp_kind(model, layer))(model)
    if losses is not None:
        _record_losses(module, losses)
    parameters = get_layer_mlp_spec(model, layer).list_parameters(model)
    return _call(module, "mlp", parameters, weights, x_BSH)


def compute_norm(
    model: ModelConfig, weights: Mapping[str, Tensor], name: str, x_BSH: Tensor
) -> Tensor:
    """Return the output of a norm over the hidden size, given by the name of its module."""
    with torch.device("meta"):
        module = get_implementation("model.norm", model.norm.kind)(model, model.hidden_size, False)
    return _call(module, name, list_norm_parameters(model, name), weights, x_BSH)


def build_reference_update(config: Config) -> ReferenceUpdate | None:
    """Return the update rule of an extension in fp64 on whole tensors.

    Return None if parameters of the same number of dimensions have different settings, as their
    roles are unknown, and for parametrizations other than standard.
    """
    roles = {ndim: [role for role in ParameterRole if _get_ndim(role) == ndim] for ndim in (1, 2)}
    settings, groups = config.optimizer, {}
    if config.model.parametrization.name is not ParametrizationName.standard:
        return None
    for ndim, of_ndim in roles.items():
        params = [(torch.empty(1), role) for role in of_ndim]
        group, *others = optimizer_factory.build_param_groups(settings, params)
        if others:
            return None
        groups[ndim] = group
    rule = optimizer_factory.get_update_rule(settings)

    def update(
        settings: OptimizerConfig, state: ReferenceState, gradient: Array | float, lr: float
    ) -> ReferenceState:
        group = groups[state.weights.ndim]
        names = ["weights", *group["state_names"]]
        gradients = np.broadcast_to(gradient, state.weights.shape)
        arrays = [gradients, *(state.tensors[name] for name in names)]
        values = [torch.from_numpy(np.array(array, np.float64)) for array in arrays]
        count, rate = torch.tensor(state.updates + 1), torch.tensor(lr * group["lr_factor"])
        updated = rule.compute(values, count, rate.double(), group)
        tensors = {name: one.numpy() for name, one in zip(names, updated, strict=True)}
        return ReferenceState(tensors, state.updates + 1)

    return update


def _get_ndim(role: ParameterRole) -> int:
    return 1 if role in (ParameterRole.norm, ParameterRole.bias, ParameterRole.sink) else 2


class _RecordedLoss(AuxiliaryLoss):
    """Auxiliary loss that is appended to a list and adds no gradient to the output."""

    def __init__(self, losses: list[Tensor]) -> None:
        super().__init__()
        self.factor, self.losses = 1.0, losses

    def forward(self, output: Tensor, loss: Tensor) -> Tensor:
        """Append the loss and return `output`."""
        self.losses.append(loss)
        return output


def _record_losses(module: nn.Module, losses: list[Tensor]) -> None:
    """Append the auxiliary losses inside of a module to a list when it is called."""
    for parent in [*module.modules()]:
        for name, child in parent.named_children():
            if isinstance(child, AuxiliaryLoss):
                setattr(parent, name, _RecordedLoss(losses))


def _call(
    module: nn.Module,
    path: str,
    parameters: tuple[ModuleParameter, ...],
    weights: Mapping[str, Tensor],
    *inputs: Any,
) -> Tensor:
    tensors = {
        parameter.name.removeprefix(f"{path}."): _assemble(parameter, weights)
        for parameter in parameters
    }
    with _Float64():
        output: Tensor = functional_call(module, tensors, inputs)
    return output


def _assemble(parameter: ModuleParameter, weights: Mapping[str, Tensor]) -> Tensor:
    """Return the tensor of a module that consists of rows of canonical tensors."""
    rows = [
        weights[row_range.name].narrow(0, row_range.start, row_range.num_rows)
        for row_range in parameter.rows
    ]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


class _Float64(TorchFunctionMode):
    """Casts to fp64 in place of fp32, in the forward pass."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        settings = {key: _widen(value) for key, value in (kwargs or {}).items()}
        return func(*map(_widen, args), **settings)


def _widen(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
