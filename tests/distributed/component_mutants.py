"""Bugs in components of the model, with the check of the doctor that finds each."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from hlat.distributed.mesh_axis import MeshAxis
from hlat.engine import state_shards
from hlat.engine.native import expert_parallel, model_parts, native_engine, tensor_parallel
from hlat.engine.native.gradient_reduction import GradientReducer
from hlat.engine.native.model_metrics import ModelStatistics
from hlat.model import attention, decoder, mlp, moe, rope
from hlat.model.auxiliary_loss import set_loss_factor
from hlat.model.experts import Experts
from hlat.model.norm import RMSNorm
from hlat.model.norm_spec import NormPlacement
from hlat.model.parameter_spec import ParameterRole, ShardingRule, list_local_experts
from tests.distributed.layout_overrides import DP, EP, KV, PP, TP
from tests.distributed.patching import Plant, around, patched


def _keep(tensor: Tensor, ignored: Tensor) -> Tensor:
    """Return a tensor such that the ignored one has a zero gradient."""
    return tensor + 0 * ignored.sum()


# Attention


def _window(change: Callable[[int], int]) -> Plant:
    def make(right: Any) -> Any:
        return lambda model, layer: (window := right(model, layer)) and change(window)

    return around(attention, "get_window", make)


def _as_the_first_layer(right: Any) -> Any:
    return lambda model, layer: right(model, 0)


def _attend(**settings: Any) -> Plant:
    """Call attention with other settings."""
    names = ("scale", "key_range", "window", "softcap", "sinks")

    def make(right: Any) -> Any:
        def attend(q, k, v, *values):
            given = dict(zip(names, values, strict=True))
            found = right(q, k, v, *(given | settings).values())
            return found if given["sinks"] is None else _keep(found, given["sinks"])

        return attend

    return around(attention, "attend", make)


def _softcap_after_mask(q, k, v, scale, key_range, window, softcap, sinks):
    """Apply the cap after the mask: masked scores are -cap instead of -inf."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    positions = torch.arange(q.shape[2])
    distances = positions.unsqueeze(1) - positions
    masked = (distances < 0) | (distances >= (window or len(positions)))
    scores = (q @ k.transpose(2, 3) * scale).masked_fill(masked, -torch.inf)
    return (softcap * torch.tanh(scores / softcap)).softmax(-1) @ v


@contextlib.contextmanager
def _norm_after_rope() -> Iterator[None]:
    normalize, rotate = attention.Attention._normalize, attention.apply_rotary_emb

    def postpone(self, norm, x):
        x.normalize = lambda rotated: normalize(self, norm, rotated)
        return x

    def rotate_and_normalize(x, cos_sin):
        return x.normalize(rotate(x, cos_sin))

    with (
        mock.patch.object(attention.Attention, "_normalize", postpone),
        mock.patch.object(attention, "apply_rotary_emb", rotate_and_normalize),
    ):
        yield


def _without_bias(self, x):
    y = F.linear(x, self.weight)
    return y if self.bias is None else _keep(y, self.bias)


def _adds_bias_on_each_rank(right: Any) -> Any:
    def forward(self, *inputs):
        return right(self, *inputs) + self.o_bias * len(self.o_proj._forward_hooks)

    return forward


# Rotary embedding


def _rope(change: Callable[[Any], dict[str, Any]]) -> Plant:
    """Compute the rotary embedding with other settings."""

    def make(right: Any) -> Any:
        def compute(model, *more):
            return right(replace(model, rope=replace(model.rope, **change(model.rope))), *more)

        return compute

    return around(decoder, "compute_rope_cos_sin", make)


def _without_transition(settings, frequencies):
    low = settings.original_max_positions * frequencies < settings.low_freq_factor * 2 * torch.pi
    return torch.where(low, frequencies / settings.factor, frequencies)


# Decoder layer


def _other_norms(placement: NormPlacement, *names: str | None) -> Plant:
    return patched(decoder, NORM_NAMES=decoder.NORM_NAMES | {placement: names})


def _norm_after_addition(self, x, *more):
    """Normalize the residual stream, as the original transformer does."""
    _, after_attention, _, after_mlp = self.norm_names
    x = self._normalize(after_attention, self._add(x, self.self_attn(x, *more)))
    return self._normalize(after_mlp, self._add(x, self.mlp(x)))


# Head


def _loss_without(index: int, value: Any) -> Plant:
    """Compute the loss without one of the last settings: soft-cap and z-loss."""

    def make(right: Any) -> Any:
        def loss(*settings):
            changed = [*settings]
            changed[index] = value
            return right(*changed)

        return loss

    return around(native_engine, "linear_cross_entropy", make)


# Parallelism


def _over_local_heads(axis, num_replicas, tensor):
    return tensor * axis.size / num_replicas


def _without_backward(axis, num_replicas, tensor):
    total = tensor.detach().clone()
    axis.all_reduce(total)
    return (total - tensor.detach()) / num_replicas + tensor / num_replicas


# Initial values


def _starts_at(role: ParameterRole, value: float) -> Plant:
    def make(right: Any) -> Any:
        def values(parameter, *more):
            found = right(parameter, *more)
            return np.full_like(found, value) if parameter.role is role else found

        return values

    return around(state_shards, "compute_initial_values", make)


def _route_without_normalization(self, x):
    probs = F.linear(x.float(), self.weight.float()).softmax(-1)
    return probs.topk(self.settings.experts_per_token)


def _route_in_bf16(self, x):
    logits = F.linear(x.bfloat16(), self.weight.bfloat16())
    weights, experts = logits.float().softmax(-1).topk(self.settings.experts_per_token)
    return weights / weights.sum(-1, keepdim=True), experts


def _detach_router(right: Any) -> Any:
    def route(self, x):
        weights, experts = right(self, x)
        return _keep(weights.detach(), self.weight), experts

    return route


def _roll_tokens(right: Any) -> Any:
    return lambda self, rows, counts: right(self, rows, counts).roll(1, 0)


def _detach_other_experts(right: Any) -> Any:
    """Give each router the gradient of the weights of this rank's experts only."""

    def apply(part, axis):
        right(part, axis)
        for module in part.modules():
            if axis.size > 1 and isinstance(module, moe.Router):
                local = list_local_experts(module.settings.num_experts, axis.size, axis.rank)
                module.forward = partial(_route_to_local_experts, module.forward, local)

    return apply


def _route_to_local_experts(right: Any, local: range, x: Tensor) -> tuple[Tensor, Tensor]:
    weights, experts = right(x)
    is_local = (experts >= local.start) & (experts < local.stop)
    return weights.where(is_local, weights.detach()), experts


def _use_losses_of_each_rank(right: Any) -> Any:
    """Give each tensor-parallel rank the full weight of the losses of routers."""

    def train_step(self, *inputs):
        def set_factor(parts, factor):
            set_loss_factor(parts, factor * self._mesh.tp.size)

        with mock.patch.object(native_engine, "set_loss_factor", set_factor):
            return right(self, *inputs)

    return train_step


def _add_twice(right: Any) -> Any:
    return lambda self, x, y: right(self, x, right(self, x, y))


def _update_from_local_counts(right: Any) -> Any:
    """Update the bias of routers with the counts of one data-parallel rank."""

    def update(self, skip):
        mesh, self._mesh = self._mesh, SimpleNamespace(dp=MeshAxis([0], 0))
        right(self, skip)
        self._mesh = mesh

    return update


def _route_padding(right: Any) -> Any:
    """Count four tokens of zeros after each sequence in the losses of the router."""

    def route(self, x):
        weights, experts = right(self, F.pad(x, (0, 0, 0, 4)))
        return weights[:, :-4], experts[:, :-4]

    return route


def _multiply_gradients_of_experts(right: Any) -> Any:
    def finalize(self, name):
        gradient = right(self, name)
        return gradient * self._mesh.ep.size if ".experts." in name else gradient

    return finalize


def _roll_outputs(right: Any) -> Any:
    return lambda *inputs: right(*inputs).roll(1, 0)


_replicated_only = {"is_summed_over_tp": lambda self, sequence_parallel: sequence_parallel}

MUTANTS: dict[str, Plant] = {
    "window too long": _window(lambda window: window + 1),
    "window too short": _window(lambda window: window - 1),
    "window in no layer": _window(lambda window: 10**6),
    "window of the first layer": around(attention, "get_window", _as_the_first_layer),
    "probabilities of experts not normalized": patched(
        moe.Router, forward=_route_without_normalization
    ),
    "router in bf16": patched(moe.Router, forward=_route_in_bf16),
    "no gradient of the router": around(moe.Router, "forward", _detach_router),
    "outputs of experts at wrong tokens": around(Experts, "forward", _roll_tokens),
    "shared expert added twice": around(moe.MoE, "_add_shared", _add_twice),
    "router losses of each rank": around(
        native_engine.NativeEngine, "train_step", _use_losses_of_each_rank
    ),
    "bias of local counts": around(ModelStatistics, "update_buffers", _update_from_local_counts),
    "load of local counts": around(ModelStatistics, "update_buffers", _update_from_local_counts),
    "padding is routed": around(moe.Router, "forward", _route_padding),
    "one more token per expert": around(
        moe, "compute_capacity", lambda right: lambda *inputs: right(*inputs) + 1
    ),
    "gradients of experts times ep": around(
        GradientReducer, "_finalize_gradient", _multiply_gradients_of_experts
    ),
    "router without experts of other ranks": around(
        model_parts, "apply_expert_parallel", _detach_other_experts
    ),
    "tokens return to wrong positions": around(expert_parallel, "_dispatch", _roll_outputs),
    "no QK-norm": patched(
        attention.Attention, _normalize=lambda self, norm, x: _keep(x, norm.weight)
    ),
    "QK-norm after the rotation": _norm_after_rope,
    "QK-norm of each head": patched(
        attention.Attention,
        _normalize=lambda self, norm, x: (
            F.rms_norm(x, x.shape[-1:], None, norm.eps)
            * torch.unflatten(norm.weight, 0, x.shape[-2:])
        ),
    ),
    "no attention soft-cap": _attend(softcap=None),
    "soft-cap after the mask": patched(attention, attend=_softcap_after_mask),
    "scale of the head size": _attend(scale=0.25),
    "sinks ignored": _attend(sinks=None),
    "no bias": patched(attention.Linear, forward=_without_bias),
    "output bias on each rank": around(attention.Attention, "forward", _adds_bias_on_each_rank),
    "llama3 factor": _rope(lambda rope: {"factor": rope.factor / 2}),
    "llama3 without transition": patched(rope, _scale_llama3=_without_transition),
    "linear factor": _rope(lambda rope: {"factor": rope.factor + 1}),
    "yarn factor": _rope(lambda rope: {"factor": rope.factor / 2, "attention_factor": 1.1386}),
    "yarn without factor of queries and keys": patched(
        rope, _compute_attention_factor=lambda settings: 1.0
    ),
    "dynamic scaling ignores the length": _rope(lambda rope: {"original_max_positions": 10**6}),
    "all of a head rotates": _rope(lambda rope: {"partial_rotary_factor": 1.0}),
    "one base in all layers": _rope(lambda rope: {"sliding_theta": None}),
    "all layers rotate": patched(decoder, has_rope=lambda model, layer: True),
    "layers rotate as the first": around(decoder, "has_rope", _as_the_first_layer),
    "no embedding scale": patched(decoder, compute_embedding_scale=lambda model: 1.0),
    "residual multiplier ignored": patched(decoder.DecoderLayer, _add=lambda self, x, y: x + y),
    "norms before instead of after": _other_norms(
        NormPlacement.post, "post_attention_layernorm", None, "post_feedforward_layernorm", None
    ),
    "norms after the addition": patched(decoder.DecoderLayer, forward=_norm_after_addition),
    "norms in another order": _other_norms(
        NormPlacement.sandwich,
        "input_layernorm",
        "pre_feedforward_layernorm",
        "post_attention_layernorm",
        "post_feedforward_layernorm",
    ),
    "norm without 1 +": patched(RMSNorm, get_scale=lambda self: self.weight),
    "exact gelu": around(mlp.F, "gelu", lambda right: lambda x, approximate="none": right(x)),
    "relu not squared": patched(mlp.UngatedActivation, forward=lambda self, x: F.relu(x)),
    "no final soft-cap": _loss_without(-2, None),
    "no z-loss": _loss_without(-1, 0.0),
    "tied head not summed": patched(
        GradientReducer, _sum_tied_embedding_gradients=lambda self, gradients: None
    ),
    "tied head drifts apart": patched(
        GradientReducer, _sum_tied_embedding_gradients=lambda self, gradients: None
    ),
    "norm starts at one": _starts_at(ParameterRole.norm, 1.0),
    "bias does not start at zero": _starts_at(ParameterRole.bias, 0.01),
    "QK-norm gradients not summed": patched(ShardingRule, **_replicated_only),
    "QK-norm replicas drift apart": patched(ShardingRule, **_replicated_only),
    "QK-norm over local heads": patched(tensor_parallel, _sum_over_shards=_over_local_heads),
    "QK-norm without sum in the backward pass": patched(
        tensor_parallel, _sum_over_shards=_without_backward
    ),
}

_LAYERS = "model.num_layers=4"
_BIASES = "model.attention.qkv_bias=true model.attention.output_bias=true"
_QK_NORM = "model.attention.qk_norm=true"
_PROJECTION = f"{_QK_NORM} model.attention.qk_norm_scope=projection"


def _scaled(scaling: str) -> str:
    settings = f"model.rope.scaling={scaling} model.rope.factor=4 model.rope_theta=500000"
    return f"{settings} model.rope.original_max_positions=128"


FOUND = {
    "window too long": ("model=mistral_tiny", "causality", "layer 1 head 2", "model"),
    "window too short": ("model=gemma2_tiny", "gradients", "layers.0.self_attn.k_proj", "model"),
    "window in no layer": ("model=gemma3_tiny", "causality", "layer 2 head 0", "model"),
    "window of the first layer": ("model=olmo3_tiny", "gradients", "layers.3.", "model"),
    "probabilities of experts not normalized": (
        "model=mixtral_tiny",
        "gradients",
        "layers.",
        "model",
    ),
    "router in bf16": ("model=mixtral_tiny", "gradients", "layers.", "model"),
    "no gradient of the router": ("model=mixtral_tiny", "gradients", "mlp.gate.weight", "model"),
    "outputs of experts at wrong tokens": ("model=mixtral_tiny", "gradients", "layers.", "model"),
    "shared expert added twice": (
        "model=mixtral_tiny model.mlp.moe.shared_size=64",
        "gradients",
        "mlp.shared_expert.",
        "model",
    ),
    "router losses of each rank": (
        f"model=mixtral_tiny model.mlp.moe.balance_loss=1 {TP}",
        "gradients",
        "mlp.gate.weight",
        "tp",
    ),
    "bias of local counts": (
        f"model=mixtral_tiny model.mlp.moe.bias_update_rate=0.1 {DP}",
        "numerics",
        "",
        "precision",
    ),
    "load of local counts": (
        "model=mixtral_tiny model.mlp.moe.balance_loss=4 "
        f"model.mlp.moe.balance_scope=previous_step {DP}",
        "numerics",
        "",
        "precision",
    ),
    "padding is routed": (
        "model=mixtral_tiny model.mlp.moe.balance_loss=1",
        "gradients",
        "mlp.gate.weight",
        "model",
    ),
    "one more token per expert": (
        "model=mixtral_tiny model.mlp.moe.capacity_factor=1",
        "gradients",
        "mlp.",
        "model",
    ),
    "gradients of experts times ep": (
        "model=mixtral_tiny parallelism.ep=2 parallelism.dp=4",
        "gradients",
        "mlp.experts.",
        "ep",
    ),
    "router without experts of other ranks": (EP, "gradients", "mlp.gate.weight", "ep"),
    "tokens return to wrong positions": (EP, "gradients", "mlp.experts.", "ep"),
    "no QK-norm": (_QK_NORM, "gradients", "self_attn.q_norm", "model"),
    "QK-norm after the rotation": ("model=qwen3_tiny", "gradients", "k_norm", "model"),
    "QK-norm of each head": ("model=olmo2_tiny", "gradients", "q_norm", "model"),
    "no attention soft-cap": ("model=gemma2_tiny", "gradients", "q_proj", "model"),
    "soft-cap after the mask": (
        "model.attention.logit_softcap=20",
        "causality",
        "layer 0 head 1",
        "model",
    ),
    "scale of the head size": (
        "model=gemma2_tiny model.attention.scale=0.1",
        "gradients",
        "k_proj",
        "model",
    ),
    "sinks ignored": ("model.attention.sinks=true", "gradients", "sinks", "model"),
    "no bias": ("model=qwen2_tiny", "gradients", "v_proj.bias", "model"),
    "output bias on each rank": (f"{TP} {_BIASES}", "gradients", "o_proj.bias", "tp"),
    "llama3 factor": ("model=llama_tiny", "gradients", "k_proj", "model"),
    "llama3 without transition": (_scaled("llama3"), "gradients", "q_proj", "model"),
    "linear factor": (
        "model.rope.scaling=linear model.rope.factor=8",
        "gradients",
        "q_proj",
        "model",
    ),
    "yarn factor": (_scaled("yarn"), "gradients", "q_proj", "model"),
    "yarn without factor of queries and keys": (
        "model=olmo3_tiny",
        "gradients",
        "layers.3.self_attn.q_proj",
        "model",
    ),
    "dynamic scaling ignores the length": (_scaled("dynamic"), "gradients", "q_proj", "model"),
    "all of a head rotates": (
        "model.rope.partial_rotary_factor=0.5",
        "gradients",
        "k_proj",
        "model",
    ),
    "one base in all layers": ("model=gemma3_tiny", "gradients", "q_proj", "model"),
    "all layers rotate": ("model=smollm3_tiny", "gradients", "layers.3.self_attn.q_proj", "model"),
    "layers rotate as the first": (
        "model.rope.layer_pattern=[false,true]",
        "gradients",
        "layers.1.self_attn.q_proj",
        "model",
    ),
    "no embedding scale": ("model=gemma3_tiny", "gradients", "embed_tokens", "model"),
    "residual multiplier ignored": (
        "model.residual_multiplier=0.22",
        "gradients",
        "down_proj",
        "model",
    ),
    "norms before instead of after": (
        "model=olmo2_tiny",
        "gradients",
        "post_attention_layernorm",
        "model",
    ),
    "norms after the addition": (
        "model=olmo2_tiny",
        "gradients",
        "post_feedforward_layernorm",
        "model",
    ),
    "norms in another order": (
        "model=gemma2_tiny",
        "gradients",
        "pre_feedforward_layernorm",
        "model",
    ),
    "norm without 1 +": ("model=gemma3_tiny", "gradients", "q_norm", "model"),
    "exact gelu": ("model.mlp.activation=gelu", "gradients", "up_proj", "model"),
    "relu not squared": ("model.mlp.activation=relu2", "gradients", "up_proj", "model"),
    "no final soft-cap": ("model=gemma2_tiny", "loss", "loss", "model"),
    "no z-loss": ("model.head.z_loss=1e-3", "gradients", "lm_head", "model"),
    "tied head not summed": (f"{PP} model.tie_embeddings=true", "gradients", "embed_tokens", "pp"),
    "tied head drifts apart": (
        f"{PP} model.tie_embeddings=true",
        "replicas",
        "embed_tokens",
        "pp",
    ),
    "norm starts at one": ("model=gemma3_tiny", "initialisation", "q_norm", "model"),
    "bias does not start at zero": ("model=qwen2_tiny", "initialisation", "k_proj.bias", "model"),
    "QK-norm gradients not summed": (f"{TP} model=qwen3_tiny", "gradients", "k_norm", "tp"),
    "QK-norm replicas drift apart": (f"{TP} model=qwen3_tiny", "replicas", "q_norm", "tp"),
    "QK-norm over local heads": (f"{TP} model=olmo2_tiny", "gradients", "q_norm", "tp"),
    "QK-norm without sum in the backward pass": (
        f"{KV} model=olmo2_tiny",
        "gradients",
        "q_proj",
        "tp",
    ),
}
"""Overrides, failing check, part of the name of the finding, and axis of each mutant."""
