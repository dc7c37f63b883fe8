"""Causal attention by blocks of queries that torch.compile fuses, for short sequences in bf16.

Each block multiplies its queries with the keys up to its last query only, and torch.compile fuses
the operators between two matmuls. On a CPU, this is faster than the kernel of torch, which
recomputes the probabilities in the backward pass. Here they are saved, so their memory is quadratic
in the length: for 512 tokens and heads of 64 elements, 1.3 times that of queries, keys, values and
output with a key per query head.

Scores are computed in fp32. Probabilities and their gradients are rounded to the dtype of the
queries before the other matmuls, as in the kernel of torch.

Tensor names end in their dimensions as in attention_kernels.py; M are the R x T queries of a group
in a block of T positions, P the B x G groups of all rows.
"""

# ruff: noqa: N812

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK_SIZE = 128
"""Queries of a block: few enough to skip most invisible keys, enough for full matmul speed."""
_MAX_QUERIES = 512
"""Limit of the memory of the probabilities relative to that of the queries."""


def can_fuse_blocks(q_BNSD: Tensor) -> bool:
    """Return True within torch.compile if the blocks are faster than torch's kernel."""
    is_short_bf16 = q_BNSD.dtype is torch.bfloat16 and q_BNSD.shape[2] <= _MAX_QUERIES
    return torch.compiler.is_compiling() and is_short_bf16


def causal_block_attention(q_BNSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, scale: float) -> Tensor:
    """Return y_BNSD, the causal softmax of the scores times the values."""
    y_BNSD: Tensor = _CausalBlockAttention.apply(  # type: ignore[no-untyped-call]
        q_BNSD, k_BGSD, v_BGSD, scale
    )
    return y_BNSD


class _CausalBlockAttention(torch.autograd.Function):
    """Autograd function of `causal_block_attention`."""

    @staticmethod
    def forward(ctx: Any, q_BNSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, scale: float) -> Tensor:
        num_groups = k_BGSD.shape[1]
        q_PRSD, k_PSD, v_PSD = (
            _group_queries(q_BNSD, num_groups),
            k_BGSD.flatten(0, 1),
            v_BGSD.flatten(0, 1),
        )
        outputs, probabilities = [], []
        for start, end in _iter_blocks(q_BNSD.shape[2]):
            scores_PMK = _compute_scores(q_PRSD[:, :, start:end], k_PSD[:, :end], scale)
            p_PMK = scores_PMK.softmax(-1).to(v_PSD.dtype)
            outputs.append(_split_queries(torch.bmm(p_PMK, v_PSD[:, :end]), end - start))
            probabilities.append(p_PMK)
        y_BNSD = torch.cat(outputs, 2).view(q_BNSD.shape)
        ctx.save_for_backward(q_BNSD, k_BGSD, v_BGSD, *probabilities)
        ctx.scale = scale
        return y_BNSD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BNSD: Tensor) -> tuple[Tensor | None, ...]:
        q_BNSD, k_BGSD, v_BGSD, *probabilities = ctx.saved_tensors
        num_groups = k_BGSD.shape[1]
        k_PSD, v_PSD = k_BGSD.flatten(0, 1), v_BGSD.flatten(0, 1)
        q_PRSD, grad_PRSD = (_group_queries(x, num_groups) for x in (q_BNSD, grad_BNSD))
        grad_q, grad_k, grad_v = [], [], []
        for (start, end), p_PMK in zip(_iter_blocks(q_BNSD.shape[2]), probabilities, strict=True):
            q_PMD, grad_PMD = (x[:, :, start:end].flatten(1, 2) for x in (q_PRSD, grad_PRSD))
            grad_p_PMK = torch.bmm(grad_PMD, v_PSD[:, :end].transpose(1, 2)).float()
            mean_PM1 = (p_PMK * grad_p_PMK).sum(-1, keepdim=True)
            grad_scores_PMK = (p_PMK * (grad_p_PMK - mean_PM1) * ctx.scale).to(k_PSD.dtype)
            grad_q.append(_split_queries(torch.bmm(grad_scores_PMK, k_PSD[:, :end]), end - start))
            grad_k.append(torch.bmm(grad_scores_PMK.transpose(1, 2), q_PMD))
            grad_v.append(torch.bmm(p_PMK.transpose(1, 2), grad_PMD))
        return (
            torch.cat(grad_q, 2).view(q_BNSD.shape),
            _sum_prefixes(grad_k).view(k_BGSD.shape),
            _sum_prefixes(grad_v).view(v_BGSD.shape),
            None,
        )


def _iter_blocks(num_queries: int) -> Iterator[tuple[int, int]]:
    """Yield the first query of each block, and the first one after it."""
    for start in range(0, num_queries, _BLOCK_SIZE):
        yield start, min(start + _BLOCK_SIZE, num_queries)


def _compute_scores(q_PRTD: Tensor, k_PKD: Tensor, scale: float) -> Tensor:
    """Return the scores in fp32, -inf for later keys; the queries are the last positions."""
    scores_PMK = torch.bmm((q_PRTD.float() * scale).flatten(1, 2), k_PKD.float().transpose(1, 2))
    num_queries, num_keys = q_PRTD.shape[2], k_PKD.shape[1]
    positions_T = torch.arange(num_keys - num_queries, num_keys, device=k_PKD.device)
    is_later_TK = torch.arange(num_keys, device=k_PKD.device) > positions_T.unsqueeze(1)
    scores_PRTK = torch.unflatten(scores_PMK, 1, (-1, num_queries))
    return scores_PRTK.masked_fill(is_later_TK, float("-inf")).flatten(1, 2)


def _group_queries(x_BNS: Tensor, num_groups: int) -> Tensor:
    """Return [P, R, S, ...] from [B, N, S, ...]."""
    return torch.unflatten(x_BNS, 1, (num_groups, -1)).flatten(0, 1)


def _split_queries(x_PMD: Tensor, num_queries: int) -> Tensor:
    """Return [P, R, T, D] from [P, M, D]."""
    return torch.unflatten(x_PMD, 1, (-1, num_queries))


def _sum_prefixes(gradients: list[Tensor]) -> Tensor:
    """Return the fp32 sum of gradients [P, K, D] of the first K keys, in the dtype of each."""
    num_keys = gradients[-1].shape[1]
    padded = [F.pad(x.float(), (0, 0, 0, num_keys - x.shape[1])) for x in gradients]
    return torch.stack(padded).sum(0).to(gradients[-1].dtype)
