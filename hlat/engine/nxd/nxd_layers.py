"""hlat's model on NxD's layers, replaced according to the sharding rules, and the loss.

Any consecutive rows of a fused weight are a shard, so that NxD's ColumnParallelLinear shards q/k/v
and gate/up like any other matrix. NxD has a separate layer for key/value heads that several
ranks share.
"""

# ruff: noqa: N812  F is the conventional name.

import math

import torch
import torch.nn.functional as F
from neuronx_distributed.modules.qkv_linear import GQAQKVColumnParallelLinear
from neuronx_distributed.parallel_layers import mappings
from neuronx_distributed.parallel_layers.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
)
from neuronx_distributed.parallel_layers.loss_functions import parallel_cross_entropy
from torch import Tensor, nn

from hlat.config.model import ModelConfig
from hlat.config.parallelism import ActivationCheckpointing
from hlat.config.precision import Dtype, Fp32Operator
from hlat.config.run import Config
from hlat.engine.nxd.xla_dtypes import get_xla_dtypes
from hlat.engine.parameter_shards import count_kv_replicas
from hlat.model.attention import Attention, CoreAttention
from hlat.model.decoder import Decoder, DecoderLayer
from hlat.model.decoder_spec import list_module_parameters
from hlat.model.mlp import GatedActivation
from hlat.model.norm import RMSNorm
from hlat.model.parameter_spec import ShardingRule
from hlat.model.rope import compute_rope_cos_sin

SEQUENCE_DIM = 1
"""Dimension of the tokens in activations between layers, [batch, sequence, hidden]."""


class NxdRMSNorm(RMSNorm):
    """RMSNorm in a torch dtype of xla_dtypes.py."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__(model, model.hidden_size, fp32=False)
        self._dtype = dtype

    def forward(self, x_F: Tensor) -> Tensor:
        """Scale each position to a mean square of one, then each element by its weight."""
        x_cast_BSH = x_F.to(self._dtype)
        scale_BS1 = torch.rsqrt(x_cast_BSH.square().mean(-1, keepdim=True) + self.eps)
        return (x_cast_BSH * scale_BS1 * self.weight.to(self._dtype)).to(x_F.dtype)


class NxdCoreAttention(CoreAttention):
    """Causal softmax attention in separate operators, because XLA has no fused one.

    The softmax is in a torch dtype of xla_dtypes.py. The mask is a constant of the graph.
    """

    def __init__(self, model: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__(model, layer)
        self._dtype = dtype

    def forward(  # type: ignore[override]
        self, q_BNSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, *unused: None
    ) -> Tensor:
        """Attend to this and earlier positions, scores scaled by 1 / sqrt(D); return y_BNSD."""
        q_BGRSD = torch.unflatten(q_BNSD, 1, (k_BGSD.shape[1], -1))
        scores = q_BGRSD @ k_BGSD.unsqueeze(2).transpose(-1, -2)
        scores = scores.to(self._dtype) / math.sqrt(q_BNSD.shape[-1])
        length = q_BNSD.shape[2]
        is_later_SS = torch.ones((length, length), dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(is_later_SS, torch.finfo(q_BNSD.dtype).min)
        probabilities = F.softmax(scores, dim=-1).to(v_BGSD.dtype)
        return (probabilities @ v_BGSD.unsqueeze(2)).flatten(1, 2)


class NxdDecoderLayer(DecoderLayer):
    """Decoder layer that computes cos and sin itself, so that its only input is the activation.

    XLA computes the common subexpression of all layers of a graph once.
    """

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__(config.model, layer, fp32_norms=False)
        self._sequence_length, self._model = config.batch.sequence_length, config.model
        self._fp32_dtype = get_xla_dtypes(config.compiler, config.precision)[Dtype.fp32]
        norm_dtype = _get_operator_dtype(config, Fp32Operator.norm)
        self.input_layernorm = NxdRMSNorm(config.model, norm_dtype)
        self.post_attention_layernorm = NxdRMSNorm(config.model, norm_dtype)
        softmax_dtype = _get_operator_dtype(config, Fp32Operator.softmax)
        self.self_attn.core = NxdCoreAttention(config.model, layer, softmax_dtype)

    def forward(self, x_BSH: Tensor) -> Tensor:  # type: ignore[override]
        """Add attention, then the feed-forward network, to the residual stream."""
        positions_S = torch.arange(self._sequence_length, device=x_BSH.device)
        cos_sin = compute_rope_cos_sin(
            self._model, positions_S, x_BSH.dtype, angle_dtype=self._fp32_dtype
        )
        return super().forward(x_BSH, cos_sin)


class NxdCausalLM(nn.Module):
    """Model and loss with NxD's layers, on the default device.

    NxD functions called by `forward` must be globals of this module: NxD's pipeline looks there for
    functions that it does not trace.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.model = Decoder(config.model)
        self.model.norm = NxdRMSNorm(config.model, _get_operator_dtype(config, Fp32Operator.norm))
        for layer in self.model.layers:
            self.model.layers[layer] = NxdDecoderLayer(config, int(layer))
        self.loss_dtype = _get_operator_dtype(config, Fp32Operator.loss)
        dtypes = get_xla_dtypes(config.compiler, config.precision)
        self.model.to(dtypes[config.precision.weights])
        replace_with_nxd_layers(self.model, config)

    def forward(self, tokens: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the loss; every argument is [batch, sequence].

        Targets may be any token where the weight is zero.
        """
        embed, norm, head = self.model.embed_tokens, self.model.norm, self.model.lm_head
        assert embed is not None
        assert norm is not None
        assert head is not None
        stream = embed(tokens)
        for layer in self.model.layers.values():
            stream = layer(stream)
        logits = head(norm(stream)).to(self.loss_dtype)
        losses: Tensor = parallel_cross_entropy(logits.flatten(0, 1), targets.flatten())
        return (losses * weights.flatten()).sum()


def select_checkpointed_modules(config: Config) -> list[type[nn.Module]] | None:
    """Return the module classes that activation checkpointing recomputes."""
    classes: dict[ActivationCheckpointing, list[type[nn.Module]]] = {
        ActivationCheckpointing.selective: [NxdCoreAttention, GatedActivation],
        ActivationCheckpointing.full: [NxdDecoderLayer],
    }
    return classes.get(config.parallelism.activation_checkpointing)


def _get_operator_dtype(config: Config, operator: Fp32Operator) -> torch.dtype:
    dtypes, precision = get_xla_dtypes(config.compiler, config.precision), config.precision
    return dtypes[Dtype.fp32 if operator in precision.fp32_operators else precision.compute]


def replace_with_nxd_layers(model: Decoder, config: Config) -> None:
    """Replace the layers of a model by NxD's according to the sharding rules."""
    layout = config.parallelism
    rules = {param.name: param.sharding for param in list_module_parameters(config.model)}
    for name, weight in [*model.named_parameters()]:
        path, rule = name.removesuffix(".weight"), rules[name]
        if rule is ShardingRule.replicated:
            vars(weight)["sequence_parallel_enabled"] = layout.sequence_parallel
        elif path.endswith(".qkv_proj") and count_kv_replicas(config.model, layout.tp) > 1:
            _replace_shared_qkv_proj(model, path, config)
        else:
            model.set_submodule(path, _build_nxd_layer(path, rule, weight, config))
    if layout.sequence_parallel and model.embed_tokens is not None:
        model.embed_tokens.register_forward_hook(_scatter_hook)


def _build_nxd_layer(path: str, rule: ShardingRule, weight: Tensor, config: Config) -> nn.Module:
    """Return NxD's layer for a weight of global shape [out, in]."""
    out_features, in_features = weight.shape
    layer: nn.Module
    if path == "embed_tokens":
        layer = ParallelEmbedding(
            out_features, in_features, dtype=weight.dtype, device=weight.device
        )
        return layer
    kwargs = {
        "bias": False,
        "dtype": weight.dtype,
        "device": weight.device,
        "sequence_parallel_enabled": config.parallelism.sequence_parallel,
        "sequence_dimension": SEQUENCE_DIM,
        "reduce_dtype": weight.dtype,  # other dtypes lose gradient sums (docs/neuron.md)
    }
    if rule is ShardingRule.row:
        layer = RowParallelLinear(in_features, out_features, input_is_parallel=True, **kwargs)
    else:
        layer = ColumnParallelLinear(in_features, out_features, gather_output=False, **kwargs)
    return layer


def _replace_shared_qkv_proj(model: Decoder, path: str, config: Config) -> None:
    """Replace qkv_proj by NxD's layer for key/value heads replicated over several ranks."""
    shape, tp = config.model, config.parallelism.tp
    attention = model.get_submodule(path.rpartition(".")[0])
    assert isinstance(attention, Attention)
    weight = attention.qkv_proj.weight
    attention.queries_per_group //= count_kv_replicas(shape, tp)
    layer = GQAQKVColumnParallelLinear(
        shape.hidden_size,
        [
            shape.num_attention_heads * shape.head_dim,
            shape.num_key_value_heads * shape.head_dim,
        ],
        bias=False,
        gather_output=False,
        dtype=weight.dtype,
        device=weight.device,
        sequence_parallel_enabled=config.parallelism.sequence_parallel,
        kv_size_multiplier=count_kv_replicas(shape, tp),
        fuse_qkv=False,  # norms count replicated rows once
        reduce_dtype=weight.dtype,
    )
    if config.parallelism.sequence_parallel:  # NxD's layer expects [sequence, batch, hidden]
        layer.register_forward_pre_hook(_sequence_first_hook)
        layer.register_forward_hook(_batch_first_hook)
    else:
        layer.register_forward_hook(_concat_qkv_hook)
    attention.qkv_proj = layer


def _scatter_hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    shard: Tensor = mappings.scatter_to_sequence_parallel_region(output, SEQUENCE_DIM)
    return shard


def _sequence_first_hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (inputs[0].transpose(0, 1).contiguous(),)


def _batch_first_hook(
    module: nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]
) -> Tensor:
    return torch.cat(outputs, -1).transpose(0, 1)


def _concat_qkv_hook(
    module: nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]
) -> Tensor:
    return torch.cat(outputs, -1)
