"""KV cache: keys and values of the tokens that a sequence has so far.

Entries are indexed by position, also in batches of sequences of different lengths: a new token
overwrites padding at its position and attends to no later position.

Tensor names end in their dimensions as in decoder.py; L positions of a sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from hlat.model.attention_kernels import KeyRange

KVCacheUpdate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Writes a layer's k_BGSD and v_BGSD of new tokens; returns those of all visible positions."""


@dataclass(frozen=True)
class LayerKVCache:
    """Keys and values of one layer, at every position of every sequence."""

    k_BLGD: Tensor
    v_BLGD: Tensor

    def select_rows(self, rows: slice) -> "LayerKVCache":
        """Return a view of some of the sequences."""
        return LayerKVCache(self.k_BLGD[rows], self.v_BLGD[rows])


@dataclass(frozen=True)
class KVCache:
    """KV cache of all layers by name and the positions of the tokens to append.

    Attributes:
        num_visible_positions: Number of positions that the new tokens attend to; on the host, so
            that reading it needs no device synchronization.
        has_equal_lengths: True if all sequences have the same length.
    """

    layers: dict[str, LayerKVCache]
    positions_BS: Tensor
    num_visible_positions: int
    has_equal_lengths: bool

    def build_key_range(self) -> KeyRange | None:
        """Return the positions that each new token attends to, up to its own.

        None if attention is causal (prefill), or full for one new token per sequence.
        """
        num_new = self.positions_BS.shape[1]
        is_prefill = self.num_visible_positions == num_new
        if is_prefill or (self.has_equal_lengths and num_new == 1):
            return None
        return KeyRange(None, self.positions_BS)

    def get_layer_update(self, layer: str) -> KVCacheUpdate:
        """Return the function that updates the cache of a layer."""
        return partial(self._update_layer, self.layers[layer])

    def _update_layer(
        self, cache: LayerKVCache, k_BGSD: Tensor, v_BGSD: Tensor
    ) -> tuple[Tensor, Tensor]:
        if not cache.k_BLGD.shape[1]:  # a cache without capacity: a single forward pass
            return k_BGSD, v_BGSD.contiguous()
        cache.k_BLGD[self._position_index] = k_BGSD.transpose(1, 2)
        cache.v_BLGD[self._position_index] = v_BGSD.transpose(1, 2)
        visible = slice(0, self.num_visible_positions)
        return cache.k_BLGD[:, visible].transpose(1, 2), cache.v_BLGD[:, visible].transpose(1, 2)

    @cached_property
    def _position_index(self) -> Any:
        """Index of the new tokens; a slice where possible, since it copies fastest."""
        num_rows, num_tokens = self.positions_BS.shape
        if self.has_equal_lengths:
            stop = self.num_visible_positions
            return slice(None), slice(stop - num_tokens, stop)
        return torch.arange(num_rows, device=self.positions_BS.device)[:, None], self.positions_BS
