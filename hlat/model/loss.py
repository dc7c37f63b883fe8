"""The output head and its cross-entropy, a few rows of logits at a time.

The logits of a micro batch are its largest tensor by far, and nobody asks for them: the loss wants
one number and the layers below one gradient of the size of their output. So logits are made, used
and dropped chunk by chunk, and since the gradients of a sum are known as soon as the chunk is, they
are made in the forward pass and nothing is computed twice.

Names end in dimensions as in llama.py; N rows are B x S positions.
"""

# ruff: noqa: N812  F is what the field calls it.

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hlat.model.canonical import rows_at_once

IGNORED = -100
"""A target that the loss does not count: torch's own default."""
_FEW_ROWS, _FEW, _FEW_COMPILED = 64, 1 << 19, 1 << 21
"""Rows or, if those are more, elements that are cast to fp32 at a time on a CPU, for its caches, by
torch's own kernels and by what torch.compile makes, where each call costs more."""


def next_token_targets(tokens_BS: Tensor, documents_BS: Tensor | None = None) -> Tensor:
    """What each position is to predict: the token after it.

    The last position of a row predicts nothing. It is kept and ignored rather than cut off, which
    saves a copy of what the model gave for the others.

    Args:
        tokens_BS: Token ids.
        documents_BS: Which document of its row each token belongs to; the first token of a document
            is then no target.

    Returns:
        targets_BS, int64, IGNORED where nothing counts.
    """
    next_BS = tokens_BS[:, 1:].long()
    if documents_BS is not None:
        joins_BS = documents_BS[:, 1:] != documents_BS[:, :-1]
        next_BS = next_BS.masked_fill(joins_BS, IGNORED)
    return F.pad(next_BS, (0, 1), value=IGNORED)


@dataclass(frozen=True)
class Vocabulary:
    """A head that holds some tokens of the vocabulary, while others hold the rest.

    Attributes:
        first: The token of the head's first row.
        stack: Stacks a tensor in front with those that the others have at the same place.
        width: Tokens that each holds, the last perhaps fewer; 0: this head holds all.
    """

    first: int
    stack: Callable[[Tensor], Tensor]
    width: int = 0


WHOLE = Vocabulary(0, lambda tensor: tensor.unsqueeze(0))
"""A head that holds all tokens."""


def head_loss(
    x_BSH: Tensor,
    head_VH: Tensor,
    targets_BS: Tensor,
    scale: float = 1.0,
    fp32: bool = True,
    compiled: bool = False,
    vocabulary: Vocabulary = WHOLE,
) -> Tensor:
    """Cross-entropy of the targets, in nats, summed and scaled.

    Args:
        x_BSH: What the decoder returns.
        head_VH: The output head.
        targets_BS: Token ids, IGNORED where nothing counts.
        scale: Factor of the sum, such as one over the number of counted targets. Applied before
            gradients are rounded to the dtype of x, which a factor of the result is not.
        fp32: Whether logits are cast to fp32 before the softmax, and the head's gradient is summed
            over chunks in fp32; otherwise in the dtype of x.
        compiled: Whether the passes over the logits go through torch.compile, where that is faster
            than torch's own and the head is whole.
        vocabulary: Which tokens the head holds. If not all, the gradient of x is the part that they
            give; the loss is that of all.

    Returns:
        A scalar, fp32.
    """
    x_NH, targets_N = x_BSH.flatten(0, 1), targets_BS.flatten()
    if not torch.is_grad_enabled():  # which a Function cannot tell
        x_NH, head_VH = x_NH.detach(), head_VH.detach()
    loss: Tensor = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        x_NH, head_VH, targets_N, scale, fp32, compiled, vocabulary
    )
    return loss


class _HeadLoss(torch.autograd.Function):
    """`head_loss` over N rows, with gradients that are ready when the loss is."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NH: Tensor,
        head_VH: Tensor,
        targets_N: Tensor,
        scale: float,
        fp32: bool,
        compiled: bool,
        vocabulary: Vocabulary,
    ) -> Tensor:
        dtype = torch.float32 if fp32 else x_NH.dtype
        differentiated = any(ctx.needs_input_grad)
        grad_x_NH = torch.empty_like(x_NH) if differentiated else None
        grad_head_VH = torch.zeros_like(head_VH, dtype=dtype) if differentiated else None
        nats_N = torch.empty(len(x_NH), dtype=torch.float32, device=x_NH.device)
        passes_ = _passes_(x_NH, dtype, compiled, vocabulary)
        rows = rows_at_once(len(head_VH))
        memory = x_NH.new_empty(min(rows, len(x_NH)), len(head_VH))
        for start in range(0, len(x_NH), rows):
            chunk = slice(start, start + rows)
            x_CH, targets_C = x_NH[chunk], targets_N[chunk]
            logits_CV = torch.mm(x_CH, head_VH.t(), out=memory[: len(x_CH)])
            for few in _in_caches(logits_CV, dtype, compiled, vocabulary):
                nats_N[chunk][few] = passes_(
                    logits_CV[few], targets_C[few], scale, dtype, differentiated, vocabulary
                )
            if grad_x_NH is not None and grad_head_VH is not None:
                torch.mm(logits_CV, head_VH, out=grad_x_NH[chunk])
                _add_product_(grad_head_VH, logits_CV.t(), x_CH)
        if grad_head_VH is not None:
            ctx.gradients = grad_x_NH, grad_head_VH.to(head_VH.dtype)
        if passes_ is _softmax_to_gradient_:
            _find_again_(nats_N, x_NH, head_VH, targets_N)
        return nats_N.sum() * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x_NH, grad_head_VH = ctx.gradients
        if torch._C._autograd._get_current_graph_task_keep_graph():  # it will be asked again
            return grad_x_NH * grad, grad_head_VH * grad, None, None, None, None, None
        del ctx.gradients  # nobody else holds them now, so autograd need not copy them
        return grad_x_NH.mul_(grad), grad_head_VH.mul_(grad), None, None, None, None, None


Passes = Callable[[Tensor, Tensor, float, torch.dtype, bool, Vocabulary], Tensor]
"""`_rows_to_gradient_`, or another way to the same."""


def _passes_(x_NH: Tensor, dtype: torch.dtype, compiled: bool, vocabulary: Vocabulary) -> Passes:
    """The fastest way from logits in the dtype of x to their gradient by way of `dtype`."""
    widened = x_NH.dtype != dtype
    if vocabulary is not WHOLE:
        return _rows_to_gradient_
    if x_NH.is_cpu and not (compiled and widened):
        return _softmax_to_gradient_
    if compiled and x_NH.dtype != torch.float32:
        return _compiled_rows_to_gradient_()
    return _rows_to_gradient_


def _in_caches(
    logits_CV: Tensor, dtype: torch.dtype, compiled: bool, vocabulary: Vocabulary
) -> Iterator[slice]:
    """Rows to take at a time: where a copy is made, so few that it stays in a CPU's caches.

    All of a part of the vocabulary: shards would have to talk for every few rows.
    """
    rows, width = logits_CV.shape
    if vocabulary is WHOLE and logits_CV.is_cpu and logits_CV.dtype != dtype:
        rows = max(_FEW_ROWS, (_FEW_COMPILED if compiled else _FEW) // width)
    for start in range(0, len(logits_CV), rows):
        yield slice(start, start + rows)


@cache
def _compiled_rows_to_gradient_() -> Passes:
    """`_rows_to_gradient_` as a few kernels."""
    return torch.compile(_rows_to_gradient_, fullgraph=True)


def _rows_to_gradient_(
    logits_CV: Tensor,
    targets_C: Tensor,
    scale: float,
    dtype: torch.dtype,
    differentiated: bool,
    vocabulary: Vocabulary,
) -> Tensor:
    """Turn logits into their gradient, in their memory, by way of `dtype`; returns nats_C."""
    e_CV = logits_CV.to(dtype)
    sums_C1, nats_C1 = _exponentials_(e_CV, targets_C, vocabulary)
    if differentiated:
        logits_CV.copy_(_logit_gradient_(e_CV, sums_C1, targets_C, scale, vocabulary))
    return nats_C1.squeeze(1)


def _softmax_to_gradient_(
    logits_CV: Tensor,
    targets_C: Tensor,
    scale: float,
    dtype: torch.dtype,
    differentiated: bool,
    vocabulary: Vocabulary,
) -> Tensor:
    """`_rows_to_gradient_` by torch's softmax, one pass on a CPU where that takes four.

    What remains of a target less likely than the least normal number has no logarithm to speak of:
    its nats are inf.
    """
    p_CV = logits_CV.to(dtype)
    torch.softmax(p_CV, 1, out=p_CV)
    here_C1, at_target = _targets(targets_C, p_CV.shape[1], vocabulary)
    p_C1 = p_CV[at_target]
    if differentiated:
        p_CV[at_target] -= 1
        torch.mul(p_CV, (here_C1 * scale).to(dtype), out=logits_CV)
    nats_C1 = -p_C1.float().where(p_C1 >= torch.finfo(dtype).tiny, 0).log()
    return nats_C1.where(here_C1, 0).squeeze(1)


def _find_again_(nats_N: Tensor, x_NH: Tensor, head_VH: Tensor, targets_N: Tensor) -> None:
    """Put the cross-entropy where nats are inf, from logits that are made once more."""
    (lost_M,) = nats_N.isinf().nonzero(as_tuple=True)
    for few in torch.split(lost_M, rows_at_once(len(head_VH))):
        logits = (x_NH[few] @ head_VH.t()).float()
        nats_N[few] = F.cross_entropy(logits, targets_N[few], reduction="none")


def _exponentials_(
    logits_CV: Tensor, targets_C: Tensor, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor]:
    """Turn logits into what softmax divides by its sum, in their memory.

    Returns:
        The sums over the whole vocabulary, and the cross-entropy of the counted targets, fp32; both
        [C, 1].
    """
    logits_CV -= vocabulary.stack(logits_CV.amax(1, keepdim=True)).amax(0)
    here_C1, at_target = _targets(targets_C, logits_CV.shape[1], vocabulary)
    target_C1 = logits_CV[at_target].float().where(here_C1, 0)
    sums_C1 = logits_CV.exp_().sum(1, keepdim=True)
    both_C2 = vocabulary.stack(torch.cat((sums_C1.float(), target_C1), 1)).sum(0)
    sums_C1, target_C1 = both_C2[:, :1].to(sums_C1.dtype), both_C2[:, 1:]
    counted_C1 = (targets_C != IGNORED).unsqueeze(1)
    return sums_C1, (sums_C1.float().log() - target_C1).where(counted_C1, 0)


def _logit_gradient_(
    e_CV: Tensor, sums_C1: Tensor, targets_C: Tensor, scale: float, vocabulary: Vocabulary
) -> Tensor:
    """(softmax - one at the target) x scale, 0 where nothing counts, in the memory of e_CV."""
    here_C1, at_target = _targets(targets_C, e_CV.shape[1], vocabulary)
    e_CV[at_target] -= sums_C1.where(here_C1, 0)
    counted_C1 = (targets_C != IGNORED).unsqueeze(1)
    return e_CV.mul_((counted_C1 * scale / sums_C1).to(e_CV.dtype))


def _targets(
    targets_C: Tensor, num_tokens: int, vocabulary: Vocabulary
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Which targets count and stand in a tensor [C, V] of this head, [C, 1], and where they do."""
    rows_C1 = torch.arange(len(targets_C), device=targets_C.device).unsqueeze(1)
    places_C1 = targets_C.unsqueeze(1) - vocabulary.first
    here_C1 = (targets_C.unsqueeze(1) != IGNORED) & (places_C1 >= 0) & (places_C1 < num_tokens)
    return here_C1, (rows_C1, places_C1.where(here_C1, 0))


def _add_product_(sum_VH: Tensor, a_VC: Tensor, b_CH: Tensor) -> None:
    if sum_VH.dtype == b_CH.dtype:
        sum_VH.addmm_(a_VC, b_CH)
        return
    # A CPU makes a copy in fp32 before it adds
    rows = max(1, _FEW // b_CH.shape[1]) if sum_VH.is_cpu else len(sum_VH)
    for start in range(0, len(sum_VH), rows):
        few = slice(start, start + rows)
        sum_VH[few] += a_VC[few] @ b_CH
