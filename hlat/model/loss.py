"""Cross entropy of the output head, fused with its matmul and computed in chunks.

The logits of a micro batch are its largest tensor, but training needs only the loss and the
gradient with respect to the hidden states. Logits are computed, used and dropped chunk by chunk.
Since the gradients of a sum are known with each chunk, the forward pass computes them and nothing
is recomputed.

Tensor names end in their dimensions as in decoder.py; N rows are B x S positions, C rows of a
chunk.
"""

# ruff: noqa: N812

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hlat.model.embedding_spec import logit_chunk_size

IGNORE_INDEX = -100
"""Target that is excluded from the loss; torch's default."""
_MIN_BLOCK_ROWS, _BLOCK_ELEMENTS, _COMPILED_BLOCK_ELEMENTS = 64, 1 << 19, 1 << 21
"""Minimum rows and target elements that a CPU casts to fp32 at once, so that the copy stays in its
caches: with torch's kernels, and with torch.compile, whose calls cost more."""


def build_next_token_targets(tokens_BS: Tensor, document_ids_BS: Tensor | None = None) -> Tensor:
    """Return the next token of each position, int64, with IGNORE_INDEX where there is none.

    The last position of a row is ignored rather than removed, which avoids a copy of the hidden
    states of the others. Given the document of each token, the first of a document is no target.
    """
    next_BS = tokens_BS[:, 1:].long()
    if document_ids_BS is not None:
        is_boundary_BS = document_ids_BS[:, 1:] != document_ids_BS[:, :-1]
        next_BS = next_BS.masked_fill(is_boundary_BS, IGNORE_INDEX)
    return F.pad(next_BS, (0, 1), value=IGNORE_INDEX)


@dataclass(frozen=True)
class VocabShard:
    """Tensor-parallel shard of the vocabulary of an output head.

    Attributes:
        start_index: First token of the shard.
        all_gather: Stacks the tensors of all shards along a new first dimension.
        shard_size: Tokens per shard, the last may have fewer; 0: the head is not sharded.
    """

    start_index: int
    all_gather: Callable[[Tensor], Tensor]
    shard_size: int = 0


FULL_VOCAB = VocabShard(0, lambda tensor: tensor.unsqueeze(0))
"""Vocabulary of a head that is not sharded."""


def compute_logits(x_NH: Tensor, head_VH: Tensor, softcap: float | None = None) -> Tensor:
    """Return the logits of an output head, limited to +-softcap; logits_NV."""
    logits_NV = F.linear(x_NH, head_VH)
    return logits_NV if softcap is None else softcap * torch.tanh(logits_NV / softcap)


@torch.no_grad()
def compute_logit_statistics(
    x_BSH: Tensor,
    head_VH: Tensor,
    vocab_shard: VocabShard = FULL_VOCAB,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the largest logit, and the mean over positions of log(sum(exp(logits))), in fp32.

    Both cover the full vocabulary and all positions.
    """
    x_NH, maxima, log_sums = x_BSH.flatten(0, 1), [], []
    chunk_size = logit_chunk_size(len(head_VH))
    for x_CH in torch.split(x_NH, chunk_size):
        logits_CV = compute_logits(x_CH, head_VH, softcap).float()
        no_targets_C = torch.full((len(x_CH),), IGNORE_INDEX, device=x_CH.device)
        max_C1, sums_C1, _ = _exp_and_cross_entropy_(logits_CV, no_targets_C, vocab_shard)
        maxima.append(max_C1.amax())
        log_sums.append(max_C1 + sums_C1.log())
    return torch.stack(maxima).amax(), torch.cat(log_sums).mean()


def linear_cross_entropy(
    x_BSH: Tensor,
    head_VH: Tensor,
    targets_BS: Tensor,
    scale: float | None = 1.0,
    fp32: bool = True,
    compile_backend: str | None = None,
    vocab_shard: VocabShard = FULL_VOCAB,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """Return the sum of the cross entropy of the targets in nats, times `scale`, as fp32 scalar.

    Args:
        x_BSH: Output of the decoder.
        head_VH: Weight of the output head.
        targets_BS: Token ids, IGNORE_INDEX where there is no target.
        scale: Factor such as one over the number of targets. It applies before gradients are
            rounded to the dtype of x, unlike a factor of the result. None: return the cross entropy
            of each position, [B, S], without gradients.
        fp32: Compute the softmax, and accumulate the head's gradient over chunks, in fp32 instead
            of the dtype of x.
        compile_backend: Backend of torch.compile, used where compiled code is faster than eager
            kernels and the head is not sharded; None: eager kernels.
        vocab_shard: Shard of the vocabulary in head_VH. The loss covers the full vocabulary; the
            gradient of x is the shard's part of the sum.
        softcap: Limit of the logits (HeadConfig.logit_softcap).
        z_loss: Weight of the square of log(sum(exp(logits))) in the objective: gradients contain
            it, the result does not (HeadConfig.z_loss).
    """
    x_NH, targets_N = x_BSH.flatten(0, 1), targets_BS.flatten()
    if not torch.is_grad_enabled():  # not visible inside of a Function
        x_NH, head_VH = x_NH.detach(), head_VH.detach()
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        x_NH,
        head_VH,
        targets_N,
        scale,
        fp32,
        compile_backend,
        _Logits(vocab_shard, softcap, z_loss),
    )
    return loss if scale is not None else loss.view_as(targets_BS)


@dataclass(frozen=True)
class _Logits:
    """How the logits of a head become its loss; see `linear_cross_entropy`."""

    vocab_shard: VocabShard
    softcap: float | None
    z_loss: float


class _LinearCrossEntropy(torch.autograd.Function):
    """Autograd function of `linear_cross_entropy` whose forward pass computes the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NH: Tensor,
        head_VH: Tensor,
        targets_N: Tensor,
        scale: float | None,
        fp32: bool,
        compile_backend: str | None,
        options: _Logits,
    ) -> Tensor:
        dtype = torch.float32 if fp32 else x_NH.dtype
        requires_grad = any(ctx.needs_input_grad)
        assert scale is not None or not requires_grad
        grad_x_NH = torch.empty_like(x_NH) if requires_grad else None
        grad_head_VH = torch.zeros_like(head_VH, dtype=dtype) if requires_grad else None
        nats_N = torch.empty(len(x_NH), dtype=torch.float32, device=x_NH.device)
        kernel_ = _select_logit_kernel(x_NH, dtype, compile_backend, options)
        chunk_size = logit_chunk_size(len(head_VH))
        buffer = x_NH.new_empty(min(chunk_size, len(x_NH)), len(head_VH))
        for start in range(0, len(x_NH), chunk_size):
            chunk = slice(start, start + chunk_size)
            x_CH, targets_C = x_NH[chunk], targets_N[chunk]
            logits_CV = torch.mm(x_CH, head_VH.t(), out=buffer[: len(x_CH)])
            for block in _split_into_blocks(logits_CV, dtype, compile_backend, options):
                nats_N[chunk][block] = kernel_(
                    logits_CV[block], targets_C[block], scale or 0.0, dtype, requires_grad, options
                )
            if grad_x_NH is not None and grad_head_VH is not None:
                torch.mm(logits_CV, head_VH, out=grad_x_NH[chunk])
                _add_matmul_(grad_head_VH, logits_CV.t(), x_CH)
        if grad_head_VH is not None:
            ctx.gradients = grad_x_NH, grad_head_VH.to(head_VH.dtype)
        if kernel_ is _logits_to_grad_by_softmax_:
            _recompute_underflowed_(nats_N, x_NH, head_VH, targets_N)
        return nats_N if scale is None else nats_N.sum() * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x_NH, grad_head_VH = ctx.gradients
        if torch._C._autograd._get_current_graph_task_keep_graph():  # retain_graph=True
            return grad_x_NH * grad, grad_head_VH * grad, None, None, None, None, None
        del ctx.gradients  # drops the last other reference, so that autograd does not copy
        return grad_x_NH.mul_(grad), grad_head_VH.mul_(grad), None, None, None, None, None


LogitKernel = Callable[[Tensor, Tensor, float, torch.dtype, bool, _Logits], Tensor]
"""`_logits_to_grad_` or an equivalent function."""


def _select_logit_kernel(
    x_NH: Tensor, dtype: torch.dtype, compile_backend: str | None, options: _Logits
) -> LogitKernel:
    """Return the fastest function for the dtype of x and the computation dtype."""
    if options.vocab_shard is not FULL_VOCAB or options.softcap is not None or options.z_loss:
        return _logits_to_grad_
    if x_NH.is_cpu and not (compile_backend and x_NH.dtype != dtype):
        return _logits_to_grad_by_softmax_
    if compile_backend and x_NH.dtype != torch.float32:
        return _compile_logits_to_grad_(compile_backend)
    return _logits_to_grad_


def _split_into_blocks(
    logits_CV: Tensor, dtype: torch.dtype, compile_backend: str | None, options: _Logits
) -> Iterator[slice]:
    """Yield slices of rows: all rows at once unless a CPU casts them.

    A sharded head uses one block, since each block costs collectives.
    """
    num_rows, width = logits_CV.shape
    if options.vocab_shard is FULL_VOCAB and logits_CV.is_cpu and logits_CV.dtype != dtype:
        elements = _COMPILED_BLOCK_ELEMENTS if compile_backend else _BLOCK_ELEMENTS
        num_rows = max(_MIN_BLOCK_ROWS, elements // width)
    for start in range(0, len(logits_CV), num_rows):
        yield slice(start, start + num_rows)


@cache
def _compile_logits_to_grad_(backend: str) -> LogitKernel:
    return torch.compile(_logits_to_grad_, fullgraph=True, backend=backend)


def _logits_to_grad_(
    logits_CV: Tensor,
    targets_C: Tensor,
    scale: float,
    dtype: torch.dtype,
    requires_grad: bool,
    options: _Logits,
) -> Tensor:
    """Overwrite logits with their gradient, computed in `dtype`; returns nats_C."""
    exp_CV, vocab_shard = logits_CV.to(dtype), options.vocab_shard
    slope_CV = None
    if options.softcap is not None:
        exp_CV, slope_CV = _apply_softcap(exp_CV, options.softcap)
    max_C1, sums_C1, nats_C1 = _exp_and_cross_entropy_(exp_CV, targets_C, vocab_shard)
    if requires_grad:
        if options.z_loss:
            exp_CV *= 1 + 2 * options.z_loss * (sums_C1.log() + max_C1)
        grad_CV = _exp_to_grad_(exp_CV, sums_C1, targets_C, scale, vocab_shard)
        logits_CV.copy_(grad_CV if slope_CV is None else grad_CV * slope_CV)
    return nats_C1.squeeze(1)


def _apply_softcap(logits_CV: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Return limited logits, cap * tanh(logits / cap), and the derivative of each."""
    tanh_CV = torch.tanh(logits_CV / cap)
    return cap * tanh_CV, 1 - tanh_CV.square()


def _logits_to_grad_by_softmax_(
    logits_CV: Tensor,
    targets_C: Tensor,
    scale: float,
    dtype: torch.dtype,
    requires_grad: bool,
    options: _Logits,
) -> Tensor:
    """Compute `_logits_to_grad_` with torch.softmax: one pass on a CPU instead of four.

    The result is inf where the probability of the target underflows.
    """
    p_CV = logits_CV.to(dtype)
    torch.softmax(p_CV, 1, out=p_CV)
    is_local_C1, target_index = _locate_targets(targets_C, p_CV.shape[1], options.vocab_shard)
    p_C1 = p_CV[target_index]
    if requires_grad:
        p_CV[target_index] -= 1
        torch.mul(p_CV, (is_local_C1 * scale).to(dtype), out=logits_CV)
    nats_C1 = -p_C1.float().where(p_C1 >= torch.finfo(dtype).tiny, 0).log()
    return nats_C1.where(is_local_C1, 0).squeeze(1)


def _recompute_underflowed_(
    nats_N: Tensor, x_NH: Tensor, head_VH: Tensor, targets_N: Tensor
) -> None:
    """Overwrite infinite entries with the cross entropy of recomputed logits."""
    (underflowed_M,) = nats_N.isinf().nonzero(as_tuple=True)
    for rows in torch.split(underflowed_M, logit_chunk_size(len(head_VH))):
        logits = (x_NH[rows] @ head_VH.t()).float()
        nats_N[rows] = F.cross_entropy(logits, targets_N[rows], reduction="none")


def _exp_and_cross_entropy_(
    logits_CV: Tensor, targets_C: Tensor, vocab_shard: VocabShard
) -> tuple[Tensor, Tensor, Tensor]:
    """Overwrite logits with exp(logits - max).

    Returns:
        Maxima and sums of the exponentials over the full vocabulary, and the cross entropy in fp32
        (0 without target); all [C, 1].
    """
    max_C1 = vocab_shard.all_gather(logits_CV.amax(1, keepdim=True)).amax(0)
    logits_CV -= max_C1
    is_local_C1, target_index = _locate_targets(targets_C, logits_CV.shape[1], vocab_shard)
    target_C1 = logits_CV[target_index].float().where(is_local_C1, 0)
    sums_C1 = logits_CV.exp_().sum(1, keepdim=True)
    both_C2 = vocab_shard.all_gather(torch.cat((sums_C1.float(), target_C1), 1)).sum(0)
    sums_C1, target_C1 = both_C2[:, :1].to(sums_C1.dtype), both_C2[:, 1:]
    is_target_C1 = (targets_C != IGNORE_INDEX).unsqueeze(1)
    return max_C1, sums_C1, (sums_C1.float().log() - target_C1).where(is_target_C1, 0)


def _exp_to_grad_(
    exp_CV: Tensor, sums_C1: Tensor, targets_C: Tensor, scale: float, vocab_shard: VocabShard
) -> Tensor:
    """Overwrite exponentials with (softmax - one_hot(target)) x scale, 0 without target."""
    is_local_C1, target_index = _locate_targets(targets_C, exp_CV.shape[1], vocab_shard)
    exp_CV[target_index] -= sums_C1.where(is_local_C1, 0)
    is_target_C1 = (targets_C != IGNORE_INDEX).unsqueeze(1)
    return exp_CV.mul_((is_target_C1 * scale / sums_C1).to(exp_CV.dtype))


def _locate_targets(
    targets_C: Tensor, num_tokens: int, vocab_shard: VocabShard
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return a mask [C, 1] of the targets in this shard and their index in a tensor [C, V]."""
    rows_C1 = torch.arange(len(targets_C), device=targets_C.device).unsqueeze(1)
    columns_C1 = targets_C.unsqueeze(1) - vocab_shard.start_index
    is_target_C1 = targets_C.unsqueeze(1) != IGNORE_INDEX
    is_local_C1 = is_target_C1 & (columns_C1 >= 0) & (columns_C1 < num_tokens)
    return is_local_C1, (rows_C1, columns_C1.where(is_local_C1, 0))


def _add_matmul_(sum_VH: Tensor, a_VC: Tensor, b_CH: Tensor) -> None:
    """Add a matmul to a sum of the same or a wider dtype; in blocks if a CPU casts it."""
    if sum_VH.dtype == b_CH.dtype:
        sum_VH.addmm_(a_VC, b_CH)
        return
    num_rows = max(1, _BLOCK_ELEMENTS // b_CH.shape[1]) if sum_VH.is_cpu else len(sum_VH)
    for start in range(0, len(sum_VH), num_rows):
        block = slice(start, start + num_rows)
        sum_VH[block] += a_VC[block] @ b_CH
