"""Autoregressive decoding with a KV cache.

The weights are those of the forward pass in training. Sequence parallelism is disabled, because a
decoding step can be a single token. The last pipeline stage broadcasts its results.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hlat.config.run import Config
from hlat.distributed.mesh_axis import MeshAxis
from hlat.engine.interface import DecodeState
from hlat.engine.native.pipeline_parallel import MicroBatchRunner
from hlat.engine.native.tensor_parallel import TensorParallelRegions
from hlat.model import token_sampling
from hlat.model.decoder import Decoder, DecoderLayer
from hlat.model.kv_cache import KVCache, LayerKVCache

_MAX_TOKENS_PER_FORWARD = 1024
"""Tokens of one forward pass on a CPU: enough for full matmul speed, few enough for activations to
stay in the caches."""

_KVCaches = dict[int, dict[str, LayerKVCache]]
"""KV cache of each layer, by stage and layer name."""


@dataclass(frozen=True)
class DecodeContext:
    """Model parts of this rank and their communication."""

    config: Config
    model_parts: Mapping[int, Decoder]
    runner: MicroBatchRunner
    regions: TensorParallelRegions
    pp_axis: MeshAxis
    device: torch.device

    @property
    def head(self) -> Tensor:
        """Weight of the output head; on ranks of the last stage."""
        return self.model_parts[max(self.model_parts)].lm_head_weight

    def get_max_batch_size(self, num_tokens: int) -> int:
        """Return the number of sequences per forward pass, given tokens per sequence."""
        if self.device.type != "cpu":
            return sys.maxsize
        return max(1, _MAX_TOKENS_PER_FORWARD // num_tokens)

    def to_device(self, array: NDArray[np.int64] | NDArray[np.int32]) -> Tensor:
        """Return an int64 copy on the device."""
        return torch.from_numpy(array).to(self.device, torch.int64)

    def broadcast_from_last_stage(self, tensor: Tensor) -> NDArray[Any]:
        """Return the tensor of the last stage on all ranks; the other ranks pass zeros."""
        self.pp_axis.all_reduce(tensor)
        return tensor.cpu().numpy()


def build_empty_decode_state(context: DecodeContext) -> "NativeDecodeState":
    """Return a state of one empty sequence."""
    kv_caches = {
        stage: {name: _build_empty_cache(layer) for name, layer in part.layers.items()}
        for stage, part in context.model_parts.items()
    }
    return NativeDecodeState(context, kv_caches, np.zeros(1, np.int64), 0)


class NativeDecodeState:
    """Implementation of hlat.engine.interface.DecodeState.

    `lengths` counts the cached tokens of each sequence, `capacity` the positions of the caches.
    """

    def __init__(
        self,
        context: DecodeContext,
        kv_caches: _KVCaches,
        lengths: NDArray[np.int64],
        capacity: int,
    ) -> None:
        self._context, self._kv_caches = context, kv_caches
        self._lengths, self._capacity = lengths, capacity
        self._input_lengths = np.zeros_like(lengths)
        self._outputs: Tensor | None = None

    @torch.inference_mode()
    def select(self, rows: NDArray[np.int64], max_new_tokens: int) -> "NativeDecodeState":
        """Return a new state with copies of some sequences of this one."""
        lengths = self._lengths[rows]
        num_used = int(lengths.max())
        index = self._context.to_device(rows)
        kv_caches = {
            stage: {
                name: LayerKVCache(
                    _select_cache_rows(cache.k_BLGD, index, num_used, max_new_tokens),
                    _select_cache_rows(cache.v_BLGD, index, num_used, max_new_tokens),
                )
                for name, cache in layers.items()
            }
            for stage, layers in self._kv_caches.items()
        }
        return NativeDecodeState(self._context, kv_caches, lengths, num_used + max_new_tokens)

    @torch.inference_mode()
    def concat(self, others: Sequence[DecodeState], max_new_tokens: int) -> "NativeDecodeState":
        """Return a new state with copies of the sequences of this one, then of others."""
        states = [self, *cast("Sequence[NativeDecodeState]", others)]
        lengths = np.concatenate([state._lengths for state in states])
        capacity = int(lengths.max()) + max_new_tokens
        kv_caches = {
            stage: {
                name: _concat_caches([state._kv_caches[stage][name] for state in states], capacity)
                for name in layers
            }
            for stage, layers in self._kv_caches.items()
        }
        return NativeDecodeState(self._context, kv_caches, lengths, capacity)

    @torch.inference_mode()
    def append(self, tokens: NDArray[np.int32], input_lengths: NDArray[np.int64]) -> None:
        """Run the model on the next tokens of each sequence and cache their keys and values."""
        step = self._context.get_max_batch_size(tokens.shape[1])
        batches = [slice(start, start + step) for start in range(0, len(tokens), step)]
        with self._context.regions.disable_sequence_parallel():
            outputs = [self._forward(rows, tokens[rows]) for rows in batches]
        last_stage_outputs = [output for output in outputs if output is not None]
        self._outputs = torch.cat(last_stage_outputs) if last_stage_outputs else None
        self._input_lengths, self._lengths = input_lengths, self._lengths + input_lengths
        self._width = tokens.shape[1]

    def _forward(self, rows: slice, tokens: NDArray[np.int32]) -> Tensor | None:
        """Return the input of the output head for some sequences; None before the last stage."""
        lengths, num_tokens = self._lengths[rows], tokens.shape[1]
        longest = int(lengths.max())
        num_visible, has_equal_lengths = longest + num_tokens, longest == lengths.min()
        assert num_visible <= (self._capacity or num_tokens), "the tokens exceed the capacity"
        positions = self._context.to_device(lengths[:, None] + np.arange(num_tokens))
        kv_caches = {
            stage: KVCache(
                {name: cache.select_rows(rows) for name, cache in layers.items()},
                positions,
                num_visible,
                has_equal_lengths,
            )
            for stage, layers in self._kv_caches.items()
        }
        return self._context.runner.forward_with_cache(self._context.to_device(tokens), kv_caches)

    @torch.inference_mode()
    def compute_log_probs(
        self, rows: NDArray[np.int64], positions: NDArray[np.int64], tokens: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return log-probabilities of tokens and the argmax tokens."""
        context = self._context
        outputs, inverse = np.unique(rows * self._width + positions, return_inverse=True)
        order = np.argsort(inverse, kind="stable")
        log_probs = torch.zeros(len(rows), device=context.device)
        argmax = torch.zeros(len(outputs), dtype=torch.int64, device=context.device)
        if self._outputs is not None:
            log_probs, argmax = token_sampling.compute_log_probs(
                self._outputs.flatten(0, 1)[context.to_device(outputs)],
                context.head,
                torch.from_numpy(inverse[order]),
                context.to_device(tokens[order]),
                context.regions.vocab_shard,
                context.config.model.head.logit_softcap,
            )
        result = np.empty(len(rows), np.float32)
        result[order] = context.broadcast_from_last_stage(log_probs)
        return result, context.broadcast_from_last_stage(argmax)[inverse]

    @torch.inference_mode()
    def compute_top_log_probs(
        self,
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        tokens: NDArray[np.int64],
        num_top: int,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
        """Return log-probabilities of tokens and of the most likely tokens."""
        context = self._context
        num_top = min(num_top, context.config.model.vocab_size)
        log_probs = torch.zeros(len(rows), device=context.device)
        top_log_probs = torch.zeros(len(rows), num_top, device=context.device)
        top_tokens = torch.zeros(len(rows), num_top, dtype=torch.int64, device=context.device)
        if self._outputs is not None:
            index = context.to_device(rows * self._width + positions)
            log_probs, top_log_probs, top_tokens = token_sampling.compute_top_log_probs(
                self._outputs.flatten(0, 1)[index],
                context.head,
                context.to_device(tokens),
                num_top,
                context.regions.vocab_shard,
                context.config.model.head.logit_softcap,
            )
        broadcast = context.broadcast_from_last_stage
        return broadcast(log_probs), broadcast(top_log_probs), broadcast(top_tokens)

    @torch.inference_mode()
    def sample(
        self,
        rows: NDArray[np.int64],
        random_bits: NDArray[np.int64],
        temperatures: NDArray[np.float64],
        top_ps: NDArray[np.float64],
    ) -> NDArray[np.int32]:
        """Sample the next token of rows."""
        context = self._context
        tokens = torch.zeros(len(rows), dtype=torch.int64, device=context.device)
        if self._outputs is not None:
            head, vocab_shard = context.head, context.regions.vocab_shard
            softcap = context.config.model.head.logit_softcap
            index = context.to_device(rows * self._width + self._input_lengths[rows] - 1)
            outputs = self._outputs.flatten(0, 1)[index]
            greedy, sampled = np.flatnonzero(temperatures == 0), np.flatnonzero(temperatures)
            if len(greedy):
                tokens[greedy] = token_sampling.select_argmax_tokens(
                    outputs[greedy], head, vocab_shard, softcap
                )
            if len(sampled):
                tokens[sampled] = token_sampling.sample_tokens(
                    outputs[sampled],
                    head,
                    context.to_device(random_bits[sampled]),
                    torch.from_numpy(temperatures[sampled]).to(context.device, torch.float32),
                    torch.from_numpy(top_ps[sampled]).to(context.device),
                    vocab_shard,
                    softcap,
                )
        return context.broadcast_from_last_stage(tokens).astype(np.int32)


def _build_empty_cache(layer: torch.nn.Module) -> LayerKVCache:
    """Return the cache of a layer for one empty sequence."""
    assert isinstance(layer, DecoderLayer)
    attention = layer.self_attn
    weight, head_dim = attention.qkv_proj.weight, attention.head_dim
    num_groups = len(weight) // ((attention.queries_per_group + 2) * head_dim)
    shape = (1, 0, num_groups, head_dim)
    return LayerKVCache(weight.new_empty(shape), weight.new_empty(shape))


def _concat_caches(caches: Sequence[LayerKVCache], capacity: int) -> LayerKVCache:
    """Copy the caches of batches into that of one batch."""
    keys, values = [cache.k_BLGD for cache in caches], [cache.v_BLGD for cache in caches]
    return LayerKVCache(_concat_rows(keys, capacity), _concat_rows(values, capacity))


def _concat_rows(tensors: Sequence[Tensor], capacity: int) -> Tensor:
    result = tensors[0].new_zeros((sum(map(len, tensors)), capacity, *tensors[0].shape[2:]))
    start = 0
    for tensor in tensors:
        num_used = min(tensor.shape[1], capacity)
        result[start : start + len(tensor), :num_used] = tensor[:, :num_used]
        start += len(tensor)
    return result


def _select_cache_rows(cache: Tensor, rows: Tensor, num_used: int, max_new_tokens: int) -> Tensor:
    """Copy the used positions of rows and append empty positions."""
    selected = cache.new_zeros((len(rows), num_used + max_new_tokens, *cache.shape[2:]))
    selected[:, :num_used] = cache[rows, :num_used]
    return selected
