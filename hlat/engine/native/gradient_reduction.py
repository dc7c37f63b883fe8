"""Reduction of accumulated gradients over ranks, overlapped with the backward pass."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hlat.engine.native.device_mesh import ParallelMesh
from hlat.engine.native.gradient_accumulation import AutogradAccumulator, register_grad_hooks
from hlat.engine.native.sharded_parameters import ShardedParameters


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
        num_micro_batches: int,
    ) -> None:
        self._accumulator, self._params, self._mesh = accumulator, params, mesh
        self._dtype, self._num_micro_batches = dtype, num_micro_batches
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
        if self._mesh.sequence_parallel:
            self._all_reduce_replicated_grads(gradients)
        return gradients

    def close(self) -> None:
        """Remove all hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._accumulator.close()

    def _count_micro_batch(self, name: str, param: Tensor) -> None:
        self._counts[name] = self._counts.get(name, 0) + 1
        if self._counts[name] == self._num_micro_batches:
            self._start_reduction(name)

    def _start_reduction(self, name: str) -> None:
        sharding = self._params.sharding
        self._pending[name] = sharding.start_reduction(self._finalize_gradient(name))

    def _finalize_gradient(self, name: str) -> Tensor:
        """Cast an accumulated gradient to the reduction dtype and sum it over kv replicas."""
        gradient = self._accumulator.get_gradient(name).to(self._dtype)
        if self._mesh.kv.size > 1 and name.endswith(".qkv_proj.weight"):
            rows = self._params.local_params[name].shard.rows
            num_query_rows = sum(part.num_rows for part in rows if "q_proj" in part.name)
            self._mesh.kv.all_reduce(gradient[num_query_rows:])
        return gradient

    def _all_reduce_replicated_grads(self, gradients: Mapping[str, Tensor]) -> None:
        """Sum the gradients of norms, each from this rank's tokens, over tensor-parallel ranks."""
        vectors = [gradient for gradient in gradients.values() if gradient.dim() == 1]
        flat = torch.cat(vectors)
        self._mesh.tp.all_reduce(flat)
        sizes = [len(vector) for vector in vectors]
        torch._foreach_copy_(vectors, list(torch.split(flat, sizes)))
