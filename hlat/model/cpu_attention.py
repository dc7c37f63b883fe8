"""Attention of a CPU over one interval of keys per query, with memory linear in the length.

The operator computes blocks of queries. A block reads the keys between the first key of its first
query and its last query only, and builds its mask on the fly. Backward recomputes the attention
probabilities from the saved logsumexp, as in FlashAttention (arXiv 2205.14135). A custom operator
is opaque to torch.compile, so the blocks may depend on the values of a tensor.

16-bit inputs are computed in fp32: matmuls of this size are faster than in bf16 on a CPU without
AMX, and gradients of keys are summed in fp32.

Tensor names end in their dimensions as in attention_kernels.py.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_BLOCK_SIZE = 128
"""Queries of a block: few enough to skip most invisible keys, enough for full matmul speed."""


@torch.library.custom_op("hlat::interval_attention", mutates_args=(), device_types="cpu")
def interval_attention(
    q_BNSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    sinks_N: Tensor | None,
    first_BS: Tensor | None,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return y_BNSD and the logsumexp of scores and sink, lse_BNS.

    The query at position p attends to positions max(first_BS[p], p - window + 1) to p. `first_BS`
    contains the start of the document of each position; None: each row is one document.
    """
    y_BNSD = _empty_heads_last(q_BNSD)
    lse_BNS = _empty_lse(q_BNSD)
    for rows, blocks in _plan_rows(q_BNSD, first_BS, window):
        q, k, v = (_to_compute_dtype(x[rows]) for x in (q_BNSD, k_BGSD, v_BGSD))
        for block in blocks:
            queries, keys = block.queries, block.keys
            y, lse = _forward_block(
                q[:, :, queries], k[:, :, keys], v[:, :, keys], block, scale, softcap
            )
            if sinks_N is not None:
                sinks_N1 = sinks_N.to(lse.dtype).unsqueeze(-1)
                y = y * torch.sigmoid(lse - sinks_N1).unsqueeze(-1)
                lse = torch.logaddexp(lse, sinks_N1)
            y_BNSD[rows, :, queries] = y
            lse_BNS[rows, :, queries] = lse
    return y_BNSD, lse_BNS


@torch.library.custom_op("hlat::interval_attention_backward", mutates_args=(), device_types="cpu")
def interval_attention_backward(
    grad_BNSD: Tensor,
    q_BNSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    y_BNSD: Tensor,
    lse_BNS: Tensor,
    first_BS: Tensor | None,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values.

    A sink is a key with value 0, so the logsumexp and y contain all that these gradients need.
    """
    grad_q, grad_k, grad_v = (_empty_heads_last(x) for x in (q_BNSD, k_BGSD, v_BGSD))
    for rows, blocks in _plan_rows(q_BNSD, first_BS, window):
        tensors = (grad_BNSD, q_BNSD, k_BGSD, v_BGSD, y_BNSD)
        grad, q, k, v, y = (_to_compute_dtype(x[rows]) for x in tensors)
        sum_k, sum_v = torch.zeros_like(k), torch.zeros_like(v)
        for block in blocks:
            queries, keys = block.queries, block.keys
            block_q, block_k, block_v = _backward_block(
                grad[:, :, queries],
                q[:, :, queries],
                k[:, :, keys],
                v[:, :, keys],
                y[:, :, queries],
                lse_BNS[rows, :, queries],
                block,
                scale,
                softcap,
            )
            grad_q[rows, :, queries] = block_q
            sum_k[:, :, keys] += block_k
            sum_v[:, :, keys] += block_v
        grad_k[rows], grad_v[rows] = sum_k, sum_v
    return grad_q, grad_k, grad_v


@interval_attention.register_fake
def _(q_BNSD: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_heads_last(q_BNSD), _empty_lse(q_BNSD)


@interval_attention_backward.register_fake
def _(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_heads_last(q), _empty_heads_last(k), _empty_heads_last(v)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_BNSD, k_BGSD, v_BGSD, sinks_N, first_BS, *ctx.settings = inputs
    ctx.save_for_backward(q_BNSD, k_BGSD, v_BGSD, sinks_N, first_BS, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad_BNSD: Tensor, _grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    q_BNSD, k_BGSD, v_BGSD, sinks_N, first_BS, y_BNSD, lse_BNS = ctx.saved_tensors
    gradients = interval_attention_backward(
        grad_BNSD, q_BNSD, k_BGSD, v_BGSD, y_BNSD, lse_BNS, first_BS, *ctx.settings
    )
    grad_sinks_N = None
    if sinks_N is not None:  # derivative of a softmax whose last value is 0
        delta_BNS = (grad_BNSD.to(lse_BNS.dtype) * y_BNSD).sum(-1)
        probability_BNS = torch.exp(sinks_N.to(lse_BNS.dtype).unsqueeze(-1) - lse_BNS)
        grad_sinks_N = -(probability_BNS * delta_BNS).sum((0, 2)).to(sinks_N.dtype)
    return (*gradients, grad_sinks_N, None, None, None, None)


interval_attention.register_autograd(_backward, setup_context=_save_for_backward)


@dataclass(frozen=True)
class _Block:
    """Consecutive queries and the keys that at least one of them attends to.

    Attributes:
        mask: 0 or -inf for each query and key.
        is_causal: True if query i attends to the keys 0 to i of the block.
    """

    queries: slice
    keys: slice
    mask: Tensor
    is_causal: bool


def _plan_rows(
    q_BNSD: Tensor, first_BS: Tensor | None, window: int | None
) -> list[tuple[slice, list[_Block]]]:
    """Return the blocks of each row, or of all rows at once if they contain no documents."""
    num_tokens = q_BNSD.shape[2]
    num_earlier = num_tokens if window is None else min(num_tokens, window - 1)
    dtype = _to_compute_dtype(q_BNSD[:0]).dtype
    band = _build_band(num_earlier, window, dtype)
    if first_BS is None:
        first_BS = torch.zeros(1, num_tokens, dtype=torch.int64)
        return [(slice(None), _plan_blocks(first_BS[0], window, band))]
    return [
        (slice(row, row + 1), _plan_blocks(first_S, window, band))
        for row, first_S in enumerate(first_BS)
    ]


def _build_band(num_earlier: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return the mask of a block within one document, with `num_earlier` keys before its queries.

    The mask of each block is a slice of it.
    """
    num_keys = num_earlier + _BLOCK_SIZE
    band = torch.full((_BLOCK_SIZE, num_keys), float("-inf"), dtype=dtype)
    band.triu_(num_earlier + 1)
    if window is not None:
        band += torch.full_like(band, float("-inf")).tril_(num_earlier - window)
    return band


def _plan_blocks(first_S: Tensor, window: int | None, band: Tensor) -> list[_Block]:
    """Return the blocks of a row; a block ends at the end of a document if one is near."""
    num_tokens, num_earlier = len(first_S), band.shape[1] - _BLOCK_SIZE
    starts = (first_S == torch.arange(num_tokens)).nonzero().flatten().tolist()
    first = first_S.tolist()
    blocks, begin = [], 0
    while begin < num_tokens:
        end = min(begin + _BLOCK_SIZE, num_tokens)
        next_start = bisect_left(starts, begin + _BLOCK_SIZE // 4)
        if next_start < len(starts):
            end = min(end, starts[next_start])
        first_key = first[begin] if window is None else max(first[begin], begin - window + 1)
        mask = band[: end - begin, num_earlier - begin + first_key : num_earlier + end - begin]
        has_several_documents = first[end - 1] > begin
        if has_several_documents:
            is_other = torch.arange(first_key, end) < first_S[begin:end].unsqueeze(1)
            mask = mask.masked_fill(is_other, float("-inf"))
        is_in_window = window is None or end - begin <= window
        is_causal = first_key == begin and is_in_window and not has_several_documents
        blocks.append(_Block(slice(begin, end), slice(first_key, end), mask, is_causal))
        begin = end
    return blocks


def _forward_block(
    q: Tensor, k: Tensor, v: Tensor, block: _Block, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Return y and logsumexp of a block."""
    if softcap is None:
        mask = None if block.is_causal else block.mask
        y, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, block.is_causal, attn_mask=mask, scale=scale
        )
        return y, lse
    scores = _cap(_group(q, k) @ k.transpose(-1, -2), scale, softcap)
    scores = _add_mask(scores, block)
    lse = scores.logsumexp(-1, keepdim=True)
    y = scores.sub_(lse).exp_() @ v
    return y.view_as(q), lse.view(q.shape[:-1])


def _backward_block(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    block: _Block,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of a block."""
    if softcap is None:
        mask = None if block.is_causal else block.mask
        gradients: tuple[Tensor, Tensor, Tensor] = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, k, v, y, lse, 0.0, block.is_causal, attn_mask=mask, scale=scale
            )
        )
        return gradients
    delta = _group((grad * y).sum(-1, keepdim=True), k)
    grad, grouped_q = _group(grad, k), _group(q, k)
    capped = _cap(grouped_q @ k.transpose(-1, -2), scale, softcap)
    derivative = 1 - (capped / softcap).square_()
    probabilities = _add_mask(capped, block).sub_(_group(lse.unsqueeze(-1), k)).exp_()
    grad_scores = (grad @ v.transpose(-1, -2)).sub_(delta).mul_(probabilities)
    grad_scores.mul_(derivative.mul_(scale))
    grad_q = (grad_scores @ k).view_as(q)
    return grad_q, grad_scores.transpose(-1, -2) @ grouped_q, probabilities.transpose(-1, -2) @ grad


def _cap(scores: Tensor, scale: float, softcap: float) -> Tensor:
    """Return the capped scores, in place."""
    return scores.mul_(scale / softcap).tanh_().mul_(softcap)


def _group(x_BNSD: Tensor, k_BGSD: Tensor) -> Tensor:
    """Return [B, G, R S, D]: the queries that share a key head are rows of one matmul."""
    num_groups = k_BGSD.shape[1]
    return torch.unflatten(x_BNSD, 1, (num_groups, -1)).flatten(2, 3)


def _add_mask(scores: Tensor, block: _Block) -> Tensor:
    """Add the mask to the scores [B, G, R S, K], in place."""
    num_queries = block.queries.stop - block.queries.start
    torch.unflatten(scores, 2, (-1, num_queries)).add_(block.mask)
    return scores


def _to_compute_dtype(x: Tensor) -> Tensor:
    """Return x in fp32, or unchanged if it is fp32 or fp64; its last dimension is contiguous."""
    x = x.float() if x.element_size() < 4 else x
    return x if x.stride(-1) == 1 else x.contiguous()


def _empty_heads_last(x_BNSD: Tensor) -> Tensor:
    """Return an empty tensor of the same shape; the heads of a token are contiguous."""
    num_rows, num_heads, num_tokens, head_dim = x_BNSD.shape
    return x_BNSD.new_empty(num_rows, num_tokens, num_heads, head_dim).transpose(1, 2)


def _empty_lse(q_BNSD: Tensor) -> Tensor:
    dtype = torch.float64 if q_BNSD.dtype is torch.float64 else torch.float32
    return q_BNSD.new_empty(q_BNSD.shape[:3], dtype=dtype)
