"""hlat's model on NxD's layers, replaced according to the sharding rules, and the loss.

Any consecutive rows of a fused weight are a shard, so that NxD's ColumnParallelLinear shards q/k/v
and gate/up like any other matrix. NxD has a separate layer for key/value heads that several
ranks share.

All ranks of a pipeline stage have the same graph: a value of one rank is a tensor, because a Python
number is a constant of the graph of that rank. NxD's embedding, cross entropy and split of a
sequence use Python numbers and are therefore replaced.
"""

# ruff: noqa: N812  F is the conventional name.

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from neuronx_distributed.modules.qkv_linear import GQAQKVColumnParallelLinear
from neuronx_distributed.parallel_layers import mappings, parallel_state
from neuronx_distributed.parallel_layers.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
)
from torch import Tensor, nn

from hlat.config.model import ModelConfig
from hlat.config.parallelism import ActivationCheckpointing
from hlat.config.precision import Dtype, Fp32Operator
from hlat.config.run import Config
from hlat.distributed.parameter_shards import count_kv_replicas
from hlat.engine.nxd.xla_dtypes import get_xla_dtypes
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


class LocalVocab:
    """Rows of the vocabulary on this tensor-parallel rank; tokens of other ranks are masked."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._first_row_1: Tensor | None = None

    def find_rows(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the row of each token, 0 for a masked one, and True where it is on this rank."""
        if self._first_row_1 is None:  # of one dimension, because XLA makes scalars constants
            rank = parallel_state.get_tensor_model_parallel_rank()
            self._first_row_1 = torch.tensor([rank * self._num_rows]).to(tokens.device)
        rows = tokens - self._first_row_1
        is_local = (rows >= 0) & (rows < self._num_rows)
        return rows * is_local, is_local


class NxdParallelEmbedding(ParallelEmbedding):  # type: ignore[misc]
    """Embedding sharded over the vocabulary; with sequence parallelism, it returns a shard.

    NxD's pipeline does not trace layers with "ParallelEmbedding" in their names.
    """

    def __init__(self, weight: Tensor, sequence_parallel: bool) -> None:
        super().__init__(*weight.shape, dtype=weight.dtype, device=weight.device)
        self._vocab = LocalVocab(len(self.weight))
        self._sequence_parallel = sequence_parallel

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return the rows of tokens, summed over the ranks, of which one is not masked."""
        rows_BS, is_local_BS = self._vocab.find_rows(tokens_BS)
        x_BSH = F.embedding(rows_BS, self.weight)
        x_BSH = x_BSH * is_local_BS.unsqueeze(-1).to(x_BSH.dtype)
        reduced: Tensor
        if self._sequence_parallel:
            reduced = mappings.reduce_scatter_to_sequence_parallel_region(x_BSH, SEQUENCE_DIM)
        else:
            reduced = mappings.reduce_from_tensor_model_parallel_region(x_BSH)
        return reduced


class NxdCrossEntropy(nn.Module):
    """Cross entropy of logits that are sharded over the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self._vocab: LocalVocab | None = None

    def forward(self, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        """Return the loss of each target, in the dtype of the logits."""
        if self._vocab is None:
            self._vocab = LocalVocab(logits_NV.shape[-1])
        losses: Tensor = _ShardedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            logits_NV, *self._vocab.find_rows(targets_N)
        )
        return losses


class _ShardedCrossEntropy(torch.autograd.Function):
    """Cross entropy from this rank's logits, the column of each target, and which are here."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, columns_N: Tensor, is_local_N: Tensor) -> Tensor:
        group = parallel_state.get_tensor_model_parallel_group()
        maximum_N = logits_NV.amax(-1)
        dist.all_reduce(maximum_N, dist.ReduceOp.MAX, group)
        logits_NV = logits_NV - maximum_N.unsqueeze(-1)
        index = torch.arange(len(columns_N), device=columns_N.device), columns_N
        is_local_N = is_local_N.to(logits_NV.dtype)
        target_logits_N = logits_NV[index] * is_local_N
        dist.all_reduce(target_logits_N, group=group)
        exp_NV = logits_NV.exp()
        sum_N = exp_NV.sum(-1)
        dist.all_reduce(sum_N, group=group)
        ctx.save_for_backward(exp_NV / sum_N.unsqueeze(-1), is_local_N, *index)
        return sum_N.log() - target_logits_N

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        probabilities_NV, is_local_N, *index = ctx.saved_tensors
        gradient_NV = probabilities_NV.clone()
        gradient_NV[tuple(index)] -= is_local_N
        return gradient_NV * grad_outputs[0].unsqueeze(-1), None, None


class NxdCausalLM(nn.Module):
    """Model and loss with NxD's layers, on the default device."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.model = Decoder(config.model)
        self.model.norm = NxdRMSNorm(config.model, _get_operator_dtype(config, Fp32Operator.norm))
        for layer in self.model.layers:
            self.model.layers[layer] = NxdDecoderLayer(config, int(layer))
        self.loss_dtype = _get_operator_dtype(config, Fp32Operator.loss)
        dtypes = get_xla_dtypes(config.compiler, config.precision)
        self.model.to(dtypes[config.precision.param_dtype])
        replace_with_nxd_layers(self.model, config)
        self.cross_entropy = NxdCrossEntropy()

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
        losses: Tensor = self.cross_entropy(logits.flatten(0, 1), targets.flatten())
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
    return dtypes[Dtype.fp32 if operator in precision.fp32_operators else precision.compute_dtype]


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


def _build_nxd_layer(path: str, rule: ShardingRule, weight: Tensor, config: Config) -> nn.Module:
    """Return NxD's layer for a weight of global shape [out, in]."""
    out_features, in_features = weight.shape
    layer: nn.Module
    if path == "embed_tokens":
        return NxdParallelEmbedding(weight, config.parallelism.sequence_parallel)
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
