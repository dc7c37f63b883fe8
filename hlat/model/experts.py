"""Application of the experts of a layer to rows that are sorted by expert.

Tensor names end in their dimensions: R rows, H hidden size, E experts. Expert parallelism replaces
`Experts.forward`, so that layers contain no communication.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hlat.config.model import ModelConfig
from hlat.model.mlp import MLP

_grouped_mm: Any = torch._grouped_mm
_MIN_ROWS_PER_EXPERT = 128
"""Mean number of rows for which the weights are copied; an estimate, not measured on any device."""
_DEVICES_WITHOUT_GROUPED_MM = ("cpu", "meta", "mps", "neuron", "xla")
"""Devices on which torch runs one matmul after the other, so that the copy has no benefit."""
_WINDOW_MULTIPLE = 32
"""Rows that divide those of a bf16 matmul on a CPU; oneDNN generates code for each new shape, in
about ten times the time of the matmul of an expert."""
_ALIGNMENT = 16
"""Bytes that divide the rows of the operands of a grouped matmul."""


class Experts(nn.Module):
    """Networks of a layer, named by their index."""

    def __init__(self, model: ModelConfig, num_experts: int, size: int) -> None:
        super().__init__()
        for index in range(num_experts):
            self.add_module(str(index), MLP(model, size))

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, index: int) -> MLP:
        return self._modules[str(index)]  # type: ignore[return-value]

    def __iter__(self) -> Iterator[MLP]:
        return (self[index] for index in range(len(self)))

    def forward(self, rows_RH: Tensor, counts_E: Tensor) -> Tensor:
        """Apply each expert to its consecutive rows, of which it has `counts_E`; returns [R, H]."""
        return apply_experts([*self], rows_RH, counts_E)


def apply_experts(experts: Sequence[MLP], rows_RH: Tensor, counts_E: Tensor) -> Tensor:
    """Apply each expert to its consecutive rows, with grouped matmuls where torch has a kernel."""
    if _supports_grouped_mm(experts, rows_RH):
        return _apply_grouped(experts, rows_RH, counts_E)
    return _apply_in_turn(experts, rows_RH, counts_E)


def _apply_in_turn(experts: Sequence[MLP], rows_RH: Tensor, counts_E: Tensor) -> Tensor:
    """Apply all experts with a matmul per expert and projection.

    An expert without rows has a gradient of zero, since ranks reduce all gradients.
    """
    return _apply_projections(experts, rows_RH, _LinearInTurn, counts_E.tolist())


def _apply_grouped(experts: Sequence[MLP], rows_RH: Tensor, counts_E: Tensor) -> Tensor:
    """Apply all experts with a grouped matmul per projection, without host synchronization."""
    return _apply_projections(experts, rows_RH, _GroupedLinear, counts_E.cumsum(0).to(torch.int32))


def _apply_projections(
    experts: Sequence[MLP], rows_RH: Tensor, linear: type[torch.autograd.Function], groups: Any
) -> Tensor:
    """Apply a function for both projections, and the activation of all rows between them."""
    up = linear.apply(rows_RH, groups, *(expert.input_proj.weight for expert in experts))  # type: ignore[no-untyped-call]
    hidden = experts[0].activation(up)
    outputs_RH: Tensor = linear.apply(  # type: ignore[no-untyped-call]
        hidden, groups, *(expert.down_proj.weight for expert in experts)
    )
    return outputs_RH


class _LinearInTurn(torch.autograd.Function):
    """Product of rows [R, I] and the transposed weight of their expert, [O, I]; [R, O].

    Matmuls write to slices of the result, so that no part is copied.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int], *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, *weights)
        ctx.counts = counts
        return _multiply_in_turn(rows, counts, [weight.t() for weight in weights])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, *weights = ctx.saved_tensors
        rows_gradient, weight_gradients = None, [None] * len(weights)
        if ctx.needs_input_grad[0]:
            rows_gradient = _multiply_in_turn(gradient, ctx.counts, weights)
        if any(ctx.needs_input_grad[2:]):
            weight_gradients = [
                window.select_rows(gradient).t() @ rows[window.first : window.last]
                for window in _list_windows(rows, ctx.counts)
            ]
        return rows_gradient, None, *weight_gradients


def _multiply_in_turn(rows: Tensor, counts: list[int], weights: Sequence[Tensor]) -> Tensor:
    """Multiply the rows of each expert, [n, I], by its weight, [I, O]."""
    outputs = rows.new_empty(len(rows), weights[0].shape[1])
    for window, weight in zip(_list_windows(rows, counts), weights, strict=True):
        inputs = rows[window.first : window.last]
        if window.first == window.start:  # the next experts replace the rows after the end
            torch.mm(inputs, weight, out=outputs[window.first : window.last])
        else:
            start, end = window.start - window.first, window.end - window.first
            outputs[window.start : window.end] = (inputs @ weight)[start:end]
    return outputs


class _Window(NamedTuple):
    """Rows of an expert, from start to end, and those of its matmuls, from first to last."""

    first: int
    start: int
    end: int
    last: int

    def select_rows(self, rows: Tensor) -> Tensor:
        """Return the rows from first to last, those of other experts replaced by zeros."""
        selected = rows[self.first : self.last]
        if (self.first, self.last) == (self.start, self.end):
            return selected
        selected = selected.clone()
        selected[: self.start - self.first] = 0
        selected[self.end - self.first :] = 0
        return selected


def _list_windows(rows: Tensor, counts: list[int]) -> list[_Window]:
    """Return the window of each expert; those of bf16 on a CPU have few different lengths."""
    is_compiled = rows.dtype == torch.bfloat16 and rows.device.type == "cpu"
    multiple, num_rows = _WINDOW_MULTIPLE if is_compiled else 1, len(rows)
    windows, start = [], 0
    for count in counts:
        length, end = -(-count // multiple) * multiple, start + count
        first = max(0, min(start, num_rows - length))
        windows.append(_Window(first, start, end, min(first + length, num_rows)))
        start = end
    return windows


class _GroupedLinear(torch.autograd.Function):
    """Grouped matmul with a list of weights; the backward pass copies them again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends_E: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, ends_E, *weights)
        output: Tensor = _grouped_mm(rows, torch.stack(weights).transpose(1, 2), offs=ends_E)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends_E, *weights = ctx.saved_tensors
        gradient = gradient.contiguous()
        rows_gradient, weight_gradients = None, [None] * len(weights)
        if ctx.needs_input_grad[0]:
            rows_gradient = _grouped_mm(gradient, torch.stack(weights), offs=ends_E)
        if any(ctx.needs_input_grad[2:]):
            weight_gradients = _grouped_mm(gradient.t(), rows, offs=ends_E).unbind()
        return rows_gradient, None, *weight_gradients


def _supports_grouped_mm(experts: Sequence[MLP], rows_RH: Tensor) -> bool:
    """Return True if a grouped matmul has a kernel for the rows, and they are enough."""
    weight = experts[0].down_proj.weight
    return (
        rows_RH.device.type not in _DEVICES_WITHOUT_GROUPED_MM
        and rows_RH.dtype == torch.bfloat16
        and len(rows_RH) >= _MIN_ROWS_PER_EXPERT * len(experts)
        and not any(size * weight.itemsize % _ALIGNMENT for size in weight.shape)
    )
