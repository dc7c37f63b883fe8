"""FlexAttention (arXiv 2412.05496) for queries that attend to one interval of keys each.

The block mask is computed from the bounds of the intervals, so that no mask of queries over keys
is allocated.

Tensor names end in their dimensions as in attention_kernels.py.
"""

# ruff: noqa: N812

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

_BLOCK_SIZE = 128
"""Queries and keys of a block, the default of FlexAttention."""


def build_block_mask(first_BS: Tensor, last_BS: Tensor, num_keys: int) -> BlockMask:
    """Return the mask of queries that attend to the keys from first_BS to last_BS, inclusive."""

    def is_visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first_BS[row, query]) & (key <= last_BS[row, query])

    # A query of padding attends to nothing, so that blocks with padding are not full
    min_first, max_first = _reduce_blocks(first_BS, padding=num_keys)
    min_last, max_last = _reduce_blocks(last_BS, padding=-1)
    begins_K = torch.arange(0, num_keys, _BLOCK_SIZE, device=first_BS.device)
    ends_K = begins_K + (_BLOCK_SIZE - 1)
    is_visited = (ends_K >= min_first) & (begins_K <= max_last)
    is_full = (begins_K >= max_first) & (ends_K <= min_last)
    return BlockMask.from_kv_blocks(
        *_list_blocks(is_visited & ~is_full),
        *_list_blocks(is_full),
        BLOCK_SIZE=_BLOCK_SIZE,
        mask_mod=is_visible,
        seq_lengths=(first_BS.shape[1], num_keys),
    )


def attend_flex(
    q_BNSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    block_mask: BlockMask,
    scale: float,
    softcap: float | None,
    sinks_N: Tensor | None,
) -> Tensor:
    """Attend with FlexAttention; returns y_BNSD.

    A sink is a key with value 0: it multiplies y by the probability of all other keys.
    """
    attend = partial(
        _get_flex_attention(),
        q_BNSD,
        k_BGSD,
        v_BGSD,
        score_mod=None if softcap is None else _build_softcap(softcap),
        block_mask=block_mask,
        scale=scale,
        enable_gqa=q_BNSD.shape[1] != k_BGSD.shape[1],
    )
    if sinks_N is None:
        y_BNSD: Tensor = attend()
        return y_BNSD
    y_BNSD, auxiliary = attend(return_aux=AuxRequest(lse=True))
    factor_BNS = torch.sigmoid(auxiliary.lse - sinks_N.float().unsqueeze(-1))
    return (y_BNSD * factor_BNS.unsqueeze(-1)).to(q_BNSD.dtype)


def _reduce_blocks(positions_BS: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """Return minimum and maximum of each block of queries, [B, blocks, 1]."""
    num_padded = -positions_BS.shape[1] % _BLOCK_SIZE
    padded = F.pad(positions_BS, (0, num_padded), value=padding)
    blocks = torch.unflatten(padded, 1, (-1, _BLOCK_SIZE))
    return blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)


def _list_blocks(is_listed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of listed key blocks and their indices, listed blocks first."""
    listed = is_listed.unsqueeze(1).to(torch.int32)
    indices = listed.argsort(dim=-1, descending=True, stable=True)
    return listed.sum(-1, dtype=torch.int32), indices.to(torch.int32)


def _build_softcap(softcap: float) -> Callable[..., Tensor]:
    """Return the modification of a score."""

    def cap(score: Tensor, _row: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


def _get_flex_attention() -> Any:
    """Return flex_attention, compiled unless it is called by compiled code."""
    return flex_attention if torch.compiler.is_compiling() else _compile_flex_attention()


@cache
def _compile_flex_attention() -> Any:
    return torch.compile(flex_attention)
