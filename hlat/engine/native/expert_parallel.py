"""Expert parallelism: each rank of a group has some experts, and ranks exchange rows of tokens.

A row is the input of one selected expert of a token. Two all-to-alls per layer send the rows to the
ranks of their experts, and the outputs back to their positions; the backward pass reverses both
(GShard, arXiv 2006.16668). The gradient of an expert is therefore the sum over the tokens of all
ranks of the group, and is reduced over the ranks with the same experts only.
"""

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hlat.distributed.mesh_axis import MeshAxis
from hlat.model.decoder import Decoder
from hlat.model.experts import Experts, apply_experts
from hlat.model.parameter_spec import ModuleParameter, list_local_experts


def drop_other_experts(
    part: Decoder, parameters: Collection[ModuleParameter], axis: MeshAxis
) -> None:
    """Remove the parameters of experts on other ranks; names of the others do not change."""
    local_names = {name for name, _ in part.named_parameters()}
    for parameter in parameters:
        expert = parameter.expert
        if expert is None or parameter.name not in local_names:
            continue
        if not expert.is_local(axis.size, axis.rank):
            path, _, leaf = parameter.name.rpartition(".")
            part.get_submodule(path).register_parameter(leaf, None)


def apply_expert_parallel(part: nn.Module, axis: MeshAxis) -> None:
    """Exchange the rows of experts along an axis in each layer of a model part."""
    if axis.size == 1:
        return
    for module in part.modules():
        if isinstance(module, Experts):
            module.forward = partial(_dispatch, axis, module)  # type: ignore[method-assign]


def _dispatch(axis: MeshAxis, experts: Experts, rows_RH: Tensor, counts_E: Tensor) -> Tensor:
    """Apply the experts of all ranks to the rows of this rank, sorted by expert; [R, H].

    All ranks along the axis call it together, also those without rows.
    """
    blocks = [list_local_experts(len(experts), axis.size, rank) for rank in range(axis.size)]
    local = blocks[axis.rank]
    counts_PE = axis.all_gather(counts_E)
    counts = counts_PE.tolist()
    sent = [sum(counts[axis.rank][block.start : block.stop]) for block in blocks]
    received = [sum(row[local.start : local.stop]) for row in counts]
    rows = _exchange(rows_RH, axis, sent, received)
    local_counts_Pe = counts_PE[:, local.start : local.stop]
    order = _sort_by_expert(local_counts_Pe)
    outputs = apply_experts(
        [*experts][local.start : local.stop], rows[order], local_counts_Pe.sum(0)
    )
    return _exchange(outputs[order.argsort()], axis, received, sent)


def _sort_by_expert(counts_Pe: Tensor) -> Tensor:
    """Return the order by expert of rows in the order of rank and expert, given their numbers."""
    num_ranks, num_experts = counts_Pe.shape
    experts = counts_Pe.new_tensor(range(num_experts)).repeat(num_ranks)
    return experts.repeat_interleave(counts_Pe.flatten()).argsort(stable=True)


def _exchange(rows: Tensor, axis: MeshAxis, sent: list[int], received: list[int]) -> Tensor:
    result: Tensor = _Exchange.apply(rows, axis, sent, received)  # type: ignore[no-untyped-call]
    return result


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows; the backward pass is the reverse all-to-all of the gradients."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, axis: MeshAxis, sent: list[int], received: list[int]
    ) -> Tensor:
        ctx.axis, ctx.sent, ctx.received = axis, sent, received
        return axis.all_to_all_rows(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        rows = ctx.axis.all_to_all_rows(gradient, ctx.received, ctx.sent)
        return rows, None, None, None
