"""Copies of tokens in another order, and weighted sums of the copies.

Autograd adds the gradients of an index at their positions, since an index may repeat. The copies
are permuted, so their gradients are gathered with the inverse permutation. Tensor names end in
their dimensions: T tokens, K copies of each token, R = T K rows, H hidden size.
"""

# ruff: noqa: N812

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

_DEVICES_WITH_EMBEDDING_BAG = ("cpu",)
"""Devices on which an embedding bag takes half the time of an index and a sum."""


def copy_to_rows(x_TH: Tensor, order_R: Tensor, position_R: Tensor) -> Tensor:
    """Return K copies of each token, [R, H], in the order `order_R` with inverse `position_R`.

    The indices of the copies of a token follow each other.
    """
    rows_RH: Tensor = _CopyToRows.apply(x_TH, order_R, position_R)  # type: ignore[no-untyped-call]
    return rows_RH


def sum_rows(rows_RH: Tensor, weights_TK: Tensor, order_R: Tensor, position_R: Tensor) -> Tensor:
    """Return the weighted sum of the rows of each token, [T, H]; see `copy_to_rows`."""
    sums_TH: Tensor = _SumRows.apply(  # type: ignore[no-untyped-call]
        rows_RH, weights_TK, order_R, position_R
    )
    return sums_TH


class _CopyToRows(Function):
    """Autograd function of `copy_to_rows`."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, order_R: Tensor, position_R: Tensor) -> Tensor:
        num_copies = len(order_R) // len(x_TH)
        ctx.save_for_backward(position_R.view(-1, num_copies))
        return x_TH.index_select(0, order_R // num_copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_RH: Tensor) -> tuple[Tensor, None, None]:
        (position_TK,) = ctx.saved_tensors
        return _gather_and_sum(gradient_RH, position_TK), None, None


class _SumRows(Function):
    """Autograd function of `sum_rows`."""

    @staticmethod
    def forward(
        ctx: Any, rows_RH: Tensor, weights_TK: Tensor, order_R: Tensor, position_R: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows_RH, weights_TK, order_R, position_R)
        return _gather_and_sum(rows_RH, position_R.view_as(weights_TK), weights_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TH: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows_RH, weights_TK, order_R, position_R = ctx.saved_tensors
        gradient_RH = gradient_TH.index_select(0, order_R // weights_TK.shape[1])
        products_R11 = torch.bmm(rows_RH.unsqueeze(1), gradient_RH.unsqueeze(2))
        weights_gradient_TK = products_R11.flatten()[position_R].view_as(weights_TK)
        gradient_RH.mul_(weights_TK.flatten()[order_R].unsqueeze(1))
        return gradient_RH, weights_gradient_TK, None, None


def _gather_and_sum(
    rows_RH: Tensor, position_TK: Tensor, weights_TK: Tensor | None = None
) -> Tensor:
    """Return the sum of the rows at the positions of each token, [T, H], times their weights."""
    if rows_RH.device.type in _DEVICES_WITH_EMBEDDING_BAG:
        return F.embedding_bag(position_TK, rows_RH, mode="sum", per_sample_weights=weights_TK)
    gathered_TKH = rows_RH.index_select(0, position_TK.flatten()).view(*position_TK.shape, -1)
    if weights_TK is None:
        return gathered_TKH.sum(1)
    return torch.bmm(weights_TK.unsqueeze(1), gathered_TKH).squeeze(1)
