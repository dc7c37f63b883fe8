"""hlat's model on NxD's layers: plain modules swapped by the plan, and what NxD calls around them.

Coalesced weights keep their layout, of which any consecutive rows are a shard, so NxD's plain
column-parallel layer cuts q/k/v and gate/up as it cuts any other matrix. Only where several ranks
share a key/value head has NxD a layer of its own for that.
"""

import torch
from neuronx_distributed.modules.qkv_linear import GQAQKVColumnParallelLinear
from neuronx_distributed.parallel_layers import mappings
from neuronx_distributed.parallel_layers.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
)
from neuronx_distributed.parallel_layers.loss_functions import parallel_cross_entropy
from torch import Tensor, nn

from hlat.config.precision import Dtype, Operator
from hlat.config.run import Config
from hlat.engine.shards import kv_copies
from hlat.model.coalesced import rows
from hlat.model.llama import Attention, Layer, Llama, rotations
from hlat.parallelism.plan import Rule, rule

DTYPES = {Dtype.fp32: torch.float32, Dtype.bf16: torch.bfloat16}
SEQUENCE = 1
"""Dimension of the tokens in what flows between layers, which is [batch, sequence, hidden]."""


class Decoder(Layer):
    """A decoder layer that finds its rotations itself, so that nothing else need flow to it.

    XLA computes what all layers of a graph have in common once.
    """

    def __init__(self, config: Config, fp32_norms: bool) -> None:
        super().__init__(config.model, fp32_norms)
        self._length, self._model = config.batch.sequence_length, config.model

    def forward(self, x_BSH: Tensor) -> Tensor:  # type: ignore[override]
        """Add attention, then the feed-forward network, to the residual stream."""
        positions_S = torch.arange(self._length, device=x_BSH.device)
        model = self._model
        cos_SD, sin_SD = rotations(positions_S, model.head_dim, model.rope_theta, x_BSH.dtype)
        return super().forward(x_BSH, cos_SD, sin_SD)


class Trained(nn.Module):
    """A model with its loss, as NxD calls it.

    The functions of NxD that its forward calls are globals of this module: that is where NxD's
    pipeline looks for what it must not trace into.
    """

    def __init__(self, config: Config) -> None:
        """Make the model on whatever device is the default one, its layers cut by NxD."""
        super().__init__()
        precision = config.precision
        fp32_norms = Operator.norm in precision.fp32_operators
        self.model = Llama(config.model, fp32_norms)
        for layer in self.model.layers:
            self.model.layers[layer] = Decoder(config, fp32_norms)
        self.fp32_loss = Operator.loss in precision.fp32_operators
        self.model.to(DTYPES[precision.weights])
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
        logits = head(norm(stream))
        if self.fp32_loss:
            logits = logits.float()
        losses: Tensor = parallel_cross_entropy(logits.flatten(0, 1), targets.flatten())
        return (losses * weights.flatten()).sum()


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
