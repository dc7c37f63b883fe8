"""Sharding of gradients, updates and parameters over data-parallel ranks.

Without ZeRO every rank all-reduces every gradient. ZeRO-1 reduce-scatters the gradients of
matrices, updates this rank's rows and all-gathers the parameters (Rajbhandari et al., arXiv
1910.02054, stage 1); vectors are too small to shard. Stages 2 and 3 are in fsdp.py. If several
replicas are sharded, the gradients of a shard are then all-reduced over them (hybrid sharding,
arXiv 2304.11277, section 3.2.2).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hlat.distributed.mesh_axis import MeshAxis


class DataParallelSharding:
    """Rows of each parameter that a data-parallel rank updates, and their collectives.

    Attributes:
        axis: Ranks of a replica.
        replicas: Ranks with the same rows in other replicas.
        is_zero1: True if a rank updates some rows of each matrix that it stores.
        is_fsdp: True if a rank stores some rows of each parameter, sharded by FSDP2.
    """

    def __init__(self, axis: MeshAxis, replicas: MeshAxis, zero: int) -> None:
        self.axis, self.replicas = axis, replicas
        self.is_zero1 = zero == 1 and axis.size > 1
        self.is_fsdp = zero > 1 and axis.size > 1

    def compute_padded_rows(self, num_rows: int) -> int:
        """Return the rows of a matrix with padding to equal shards."""
        return self._get_rows_per_rank(num_rows) * self.axis.size if self.is_zero1 else num_rows

    def get_updated_rows(self, shape: tuple[int, ...]) -> slice:
        """Return the rows of a local tensor that this rank updates."""
        if not self.is_zero1 or len(shape) == 1:
            return slice(0, shape[0])
        return self.get_shard_rows(shape[0])

    def get_shard_rows(self, num_rows: int) -> slice:
        """Return this rank's rows of equal shards, the last one shorter, as FSDP2 shards them."""
        step = self._get_rows_per_rank(num_rows)
        start = min(self.axis.rank * step, num_rows)
        return slice(start, min(start + step, num_rows))

    def owns_rows(self, num_rows: int, rows: slice) -> bool:
        """Return True if this rank saves the rows that it updates and counts them in norms."""
        is_sharded = self.is_fsdp or rows != slice(0, num_rows)
        return self.replicas.rank == 0 and (is_sharded or self.axis.rank == 0)

    @property
    def accumulation_rank(self) -> int:
        """Index of this rank among those that accumulate different gradients."""
        if self.is_fsdp:
            return self.replicas.rank
        return self.replicas.rank * self.axis.size + self.axis.rank

    def all_gather_params(self, padded_data: Tensor) -> None:
        """Gather the rows of a matrix that other ranks updated, in place."""
        if self.is_zero1 and padded_data.dim() > 1:
            shards = torch.unflatten(padded_data, 0, (self.axis.size, -1))
            self.axis.all_gather_into_tensor(padded_data, shards[self.axis.rank])

    def start_reduction(self, gradient: Tensor) -> Callable[[], Tensor]:
        """Start the sum of a gradient over ranks.

        Returns:
            A function that waits for the sum and returns the rows that this rank updates.
        """
        if self.is_fsdp or self.axis.size == 1:
            return partial(_wait, _start_sum(gradient, self.replicas), gradient)
        if not self.is_zero1 or gradient.dim() == 1:
            return self._then_sum_over_replicas(
                partial(_wait, _start_sum(gradient, self.axis), gradient)
            )
        num_rows = len(gradient)
        padding = self.compute_padded_rows(num_rows) - num_rows
        if padding:
            gradient = torch.cat((gradient, gradient.new_zeros((padding, *gradient.shape[1:]))))
        shards = torch.unflatten(gradient, 0, (self.axis.size, -1))
        shard, work = self.axis.reduce_scatter_async(shards)
        rows = self.get_shard_rows(num_rows)
        return self._then_sum_over_replicas(partial(_wait, work, shard[: rows.stop - rows.start]))

    def _then_sum_over_replicas(self, finish: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return a function that sums the result of another one over replicas."""

        def finish_all() -> Tensor:
            gradient = finish()
            return _wait(_start_sum(gradient, self.replicas), gradient)

        return finish if self.replicas.size == 1 else finish_all

    def _get_rows_per_rank(self, num_rows: int) -> int:
        return -(-num_rows // self.axis.size)


def _start_sum(gradient: Tensor, axis: MeshAxis) -> Any:
    """Start the sum of a gradient over an axis; ranks without rows have peers without rows."""
    return axis.all_reduce(gradient, wait=False) if gradient.numel() else None


def _wait(work: Any, tensor: Tensor) -> Tensor:
    """Wait for a collective that may still run and return its result."""
    if work is not None:
        work.wait()
    return tensor
