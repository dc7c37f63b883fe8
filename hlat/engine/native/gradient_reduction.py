"""Reduction of accumulated gradients over ranks, overlapped with the backward pass."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hlat.distributed.device_mesh import ParallelMesh
from hlat.engine.native.gradient_accumulation import AutogradAccumulator, register_grad_hooks
from hlat.engine.native.sharded_parameters import ShardedParameters
from hlat.model.embedding_spec import EMBEDDING_NAME
from hlat.precision.record_range import record_range


class GradientReducer:
    """Gradients summed over ranks; a reduction starts after the last micro batch of a parameter.

    The hooks of the accumulator, which sums this rank's micro batches, run before the reducer's.
    """

    def __init__(
        self,
        accumulator: AutogradAccumulator,
        params: ShardedParameters,
        mesh: ParallelMesh,
        dtype: torch.dtype,
    ) -> None:
        self._accumulator, self._params, self._mesh = accumulator, params, mesh
        self._dtype = dtype
        self.num_micro_batches = 1
        """Micro batches of the step on this rank."""
        self._counts: dict[str, int] = {}
        self._pending: dict[str, Callable[[], Tensor]] = {}
        self._handles = register_grad_hooks(params.model_params, self._count_micro_batch)

    def pop_gradients(self) -> dict[str, Tensor]:
        """Wait for all reductions, and return the rows of each gradient that this rank updates."""
        for name in self._params.model_params:
            if name not in self._pending:  # zero-bubble schedules bypass the hooks
                self._start_reduction(name)
        gradients = {name: self._pending[name]() for name in self._params.model_params}
        self._pending, self._counts = {}, {}
        self._accumulator.pop_gradients()
        self._sum_replicated_gradients(gradients)
        self._sum_tied_embedding_gradients(gradients)
        return gradients

    def close(self) -> None:
        """Remove all hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._accumulator.close()

    def _count_micro_batch(self, name: str, param: Tensor) -> None:
        self._counts[name] = self._counts.get(name, 0) + 1
        if self._counts[name] == self.num_micro_batches:
            self._start_reduction(name)

    @record_range("gradient_reduction")
    def _start_reduction(self, name: str) -> None:
        sharding = self._params.local_params[name].sharding
        self._pending[name] = sharding.start_reduction(self._finalize_gradient(name))

    def _finalize_gradient(self, name: str) -> Tensor:
        """Cast an accumulated gradient to the reduction dtype and sum it over kv replicas."""
        gradient = self._accumulator.get_gradient(name).to(self._dtype)
        num_unshared_rows = self._params.local_params[name].shard.num_unshared_rows
        if self._mesh.kv.size > 1 and num_unshared_rows < len(gradient):
            self._mesh.kv.all_reduce(gradient[num_unshared_rows:])
        return gradient

    def _sum_replicated_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Sum gradients of replicated parameters that each tensor-parallel rank has a part of.

        The part is from this rank's tokens or heads, as the sharding rule of the parameter states.
        """
        if self._mesh.tp.size == 1:
            return
        parts = [
            gradient
            for name, gradient in gradients.items()
            if self._params.local_params[name].shard.sharding.is_summed_over_tp(
                self._mesh.sequence_parallel
            )
        ]
        if not parts:
            return
        flat = torch.cat([part.flatten() for part in parts])
        self._mesh.tp.all_reduce(flat)
        sums = torch.split(flat, [part.numel() for part in parts])
        copies = [each.view_as(part) for each, part in zip(sums, parts, strict=True)]
        torch._foreach_copy_(parts, copies)

    def _sum_tied_embedding_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Sum the gradients of the embedding on the first and of the head on the last stage."""
        axis = self._mesh.tied_embedding
        if axis is not None and axis.size > 1:
            axis.all_reduce(gradients[EMBEDDING_NAME])
