"""hlat's model on NxD's layers: plain modules swapped by the plan, and what NxD calls around them.

Coalesced weights keep their layout, of which any consecutive rows are a shard, so NxD's plain
column-parallel layer cuts q/k/v and gate/up as it cuts any other matrix. Only where several ranks
share a key/value head has NxD a layer of its own for that.
"""

# ruff: noqa: N812  F is what the field calls it.

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

from hlat.config.model import Model
from hlat.config.parallelism import ActivationCheckpointing
from hlat.config.precision import Dtype, Operator
from hlat.config.run import Config
from hlat.engine.nxd.dtypes import torch_dtypes
from hlat.engine.shards import kv_copies
from hlat.model.coalesced import rows
from hlat.model.llama import Attention, CoreAttention, Layer, Llama, RMSNorm, SwiGLU, rotations
from hlat.parallelism.plan import Rule, rule

SEQUENCE = 1
"""Dimension of the tokens in what flows between layers, which is [batch, sequence, hidden]."""


class Norm(RMSNorm):
    """Root mean square normalization in a dtype that torch names, see dtypes.py."""

    def __init__(self, model: Model, dtype: torch.dtype) -> None:
        super().__init__(model.hidden_size, model.rms_norm_eps, fp32=False)
        self._dtype = dtype

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Scale each position to a mean square of one, then each element by its weight."""
        wide_BSH = x_BSH.to(self._dtype)
        scale_BS1 = torch.rsqrt(wide_BSH.square().mean(-1, keepdim=True) + self.eps)
        return (wide_BSH * scale_BS1 * self.weight.to(self._dtype)).to(x_BSH.dtype)


class Core(CoreAttention):
    """Causal softmax attention, written out: of it XLA knows no fused form.

    Its mask is a constant that XLA makes on the device, so no graph is handed one.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """Compute the softmax in a dtype that torch names, see dtypes.py."""
        super().__init__()
        self._dtype = dtype

    def forward(
        self, q_BNSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, bias_B1SS: Tensor | None = None
    ) -> Tensor:
        """Attend to this and earlier positions, scores scaled by 1 / sqrt(D); returns y_BNSD."""
        q_BGRSD = torch.unflatten(q_BNSD, 1, (k_BGSD.shape[1], -1))
        scores = q_BGRSD @ k_BGSD.unsqueeze(2).transpose(-1, -2)
        scores = scores.to(self._dtype) / math.sqrt(q_BNSD.shape[-1])
        length = q_BNSD.shape[2]
        hidden_SS = torch.ones((length, length), dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden_SS, torch.finfo(q_BNSD.dtype).min)
        shares = F.softmax(scores, dim=-1).to(v_BGSD.dtype)
        return (shares @ v_BGSD.unsqueeze(2)).flatten(1, 2)


class Decoder(Layer):
    """A decoder layer that finds its rotations itself, so that nothing else need flow to it.

    XLA computes what all layers of a graph have in common once.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config.model, fp32_norms=False)
        self._length, self._model = config.batch.sequence_length, config.model
        self._wide = torch_dtypes(config.compiler, config.precision)[Dtype.fp32]
        norm, softmax = (_dtype_of(config, one) for one in (Operator.norm, Operator.softmax))
        self.input_layernorm = Norm(config.model, norm)
        self.post_attention_layernorm = Norm(config.model, norm)
        self.self_attn.core = Core(softmax)

    def forward(self, x_BSH: Tensor) -> Tensor:  # type: ignore[override]
        """Add attention, then the feed-forward network, to the residual stream."""
        positions_S = torch.arange(self._length, device=x_BSH.device)
        size, theta = self._model.head_dim, self._model.rope_theta
        cos_SD, sin_SD = rotations(positions_S, size, theta, x_BSH.dtype, self._wide)
        return super().forward(x_BSH, cos_SD, sin_SD)


class Trained(nn.Module):
    """A model with its loss, as NxD calls it.

    The functions of NxD that its forward calls are globals of this module: that is where NxD's
    pipeline looks for what it must not trace into.
    """

    def __init__(self, config: Config) -> None:
        """Make the model on whatever device is the default one, its layers cut by NxD."""
        super().__init__()
        self.model = Llama(config.model)
        self.model.norm = Norm(config.model, _dtype_of(config, Operator.norm))
        for layer in self.model.layers:
            self.model.layers[layer] = Decoder(config)
        self.loss_dtype = _dtype_of(config, Operator.loss)
        dtypes = torch_dtypes(config.compiler, config.precision)
        self.model.to(dtypes[config.precision.weights])
        self.shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        """Of the whole parameters, of which ranks hold parts."""
        swap(self.model, config)

    def forward(self, tokens: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of the loss; every argument is [batch, sequence].

        Args:
            tokens: Token ids.
            targets: What each position is to predict, any token where the weight is zero.
            weights: What the loss of each position counts.
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


def recomputed(config: Config) -> list[type[nn.Module]] | None:
    """The kinds of modules whose insides the backward pass computes again."""
    kinds: dict[ActivationCheckpointing, list[type[nn.Module]]] = {
        ActivationCheckpointing.selective: [Core, SwiGLU],
        ActivationCheckpointing.full: [Decoder],
    }
    return kinds.get(config.parallelism.activation_checkpointing)


def _dtype_of(config: Config, operator: Operator) -> torch.dtype:
    dtypes, precision = torch_dtypes(config.compiler, config.precision), config.precision
    return dtypes[Dtype.fp32 if operator in precision.fp32_operators else precision.compute]


def swap(model: Llama, config: Config) -> None:
    """Put NxD's layers in the place of a model's own, as the plan says."""
    for name, weight in [*model.named_parameters()]:
        path = name.removesuffix(".weight")
        found = rule(rows(config.model, name, len(weight))[0].name)
        if found is Rule.norm:
            vars(weight)["sequence_parallel_enabled"] = config.parallelism.sequence_parallel
        elif path.endswith(".qkv_proj") and kv_copies(config.model, config.parallelism.tp) > 1:
            _share_heads(model, path, config)
        else:
            model.set_submodule(path, _layer(path, found, weight, config))
    if config.parallelism.sequence_parallel and model.embed_tokens is not None:
        model.embed_tokens.register_forward_hook(_scatter)


def _layer(path: str, found: Rule, weight: Tensor, config: Config) -> nn.Module:
    """The layer of NxD for a weight, [out, in], of which ranks hold a part each."""
    num_out, num_in = weight.shape
    made: nn.Module
    if path == "embed_tokens":
        made = ParallelEmbedding(num_out, num_in, dtype=weight.dtype, device=weight.device)
        return made
    settings = {
        "bias": False,
        "dtype": weight.dtype,
        "device": weight.device,
        "sequence_parallel_enabled": config.parallelism.sequence_parallel,
        "sequence_dimension": SEQUENCE,
        "reduce_dtype": weight.dtype,  # any other loses sums of gradients (docs/neuron.md)
    }
    if found is Rule.row:
        made = RowParallelLinear(num_in, num_out, input_is_parallel=True, **settings)
    else:
        made = ColumnParallelLinear(num_in, num_out, gather_output=False, **settings)
    return made


def _share_heads(model: Llama, path: str, config: Config) -> None:
    """Let each key/value head be held by several ranks."""
    shape, tp = config.model, config.parallelism.tp
    attention = model.get_submodule(path.rpartition(".")[0])
    assert isinstance(attention, Attention)
    weight = attention.qkv_proj.weight
    attention.queries_per_group //= kv_copies(shape, tp)
    shared = GQAQKVColumnParallelLinear(
        shape.hidden_size,
        [shape.hidden_size, shape.num_key_value_heads * shape.head_dim],
        bias=False,
        gather_output=False,
        dtype=weight.dtype,
        device=weight.device,
        sequence_parallel_enabled=config.parallelism.sequence_parallel,
        kv_size_multiplier=kv_copies(shape, tp),
        fuse_qkv=False,  # of what is shared, norms count a part
        reduce_dtype=weight.dtype,
    )
    if config.parallelism.sequence_parallel:  # whose tokens NxD wants in front
        shared.register_forward_pre_hook(_tokens_first)
        shared.register_forward_hook(_tokens_second)
    else:
        shared.register_forward_hook(_joined)
    attention.qkv_proj = shared


def _scatter(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    scattered: Tensor = mappings.scatter_to_sequence_parallel_region(output, SEQUENCE)
    return scattered


def _tokens_first(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (inputs[0].transpose(0, 1).contiguous(),)


def _tokens_second(
    module: nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]
) -> Tensor:
    return torch.cat(outputs, -1).transpose(0, 1)


def _joined(module: nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> Tensor:
    return torch.cat(outputs, -1)
