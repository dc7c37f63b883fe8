"""The ranks along one axis of the mesh, and what they tell one another.

Everything that crosses processes goes through an axis, and an axis of one rank says nothing, so the
code above it reads the same for one process and for thousands.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renames all_gather_into_tensor and reduce_scatter_tensor, and warns of the old names
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Axis:
    """The ranks that differ from this one in their place along one axis only.

    Attributes:
        rank: Place along the axis.
        size: Ranks along it.
        group: torch's process group of them; None for one alone.
    """

    def __init__(
        self, ranks: Sequence[int], rank: int, backend: str | None = None, group: Any = None
    ) -> None:
        """Join the group; every one of the ranks does so, and no other need.

        torch names a group after its ranks and the number of groups that they have joined before,
        so all processes make their axes in the same order.

        Args:
            ranks: Global ranks along the axis, in order.
            rank: This process's global rank.
            backend: Of torch's process group; None: that of the world.
            group: One that there is; None: a new one.
        """
        self.ranks = tuple(ranks)
        self.rank, self.size = self.ranks.index(rank), len(ranks)
        self.group, self._backend = group if self.size > 1 else None, backend
        if self.size > 1 and group is None:
            # torch_xla puts one of its own in the place of torch.distributed's
            self.group = dist.distributed_c10d.new_group(
                list(ranks), backend=backend, use_local_synchronization=True
            )

    def again(self) -> "Axis":
        """The same ranks with a group of their own, for another thread."""
        return Axis(self.ranks, self.ranks[self.rank], self._backend)

    def sum_(self, tensor: Tensor, wait: bool = True) -> Any:
        """Add up a tensor over all ranks, in place; returns the work if it is not waited for."""
        return self._all_reduce(tensor, dist.ReduceOp.SUM, wait)

    def max_(self, tensor: Tensor) -> None:
        """The largest over all ranks, element by element, in place."""
        self._all_reduce(tensor, dist.ReduceOp.MAX, True)

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, stacked in front; [...] to [size, ...]."""
        every = tensor.new_empty((self.size, *tensor.shape))
        self.gather_into(every, tensor.contiguous())
        return every

    def gather_into(self, every: Tensor, own: Tensor) -> None:
        """Fill a contiguous tensor with those of all ranks; `own` may be this rank's part of it."""
        if self.group is not None:
            _all_gather(every.view(-1), own.reshape(-1), group=self.group)
        elif every.data_ptr() != own.data_ptr():
            every.view(-1).copy_(own.reshape(-1))

    def exchange(self, tensor: Tensor, other: int) -> Tensor:
        """Send a tensor to the rank at another place along the axis, and return its own."""
        arrived, there = torch.empty_like(tensor), self.ranks[other]
        both = [
            dist.P2POp(dist.isend, tensor, there, self.group),
            dist.P2POp(dist.irecv, arrived, there, self.group),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        return arrived

    def sum_and_scatter(self, every: Tensor) -> Tensor:
        """Add up over all ranks, and return this rank's part; [size, ...] to [...]."""
        own = every.new_empty(every.shape[1:])
        _reduce_scatter(own.view(-1), every.contiguous().view(-1), group=self.group)
        return own

    def start_sum_and_scatter(self, every: Tensor) -> tuple[Tensor, Any]:
        """The same, with the work to wait for; `every` must be left alone until then."""
        own = every.new_empty(every.shape[1:])
        work = _reduce_scatter(
            own.view(-1), every.contiguous().view(-1), group=self.group, async_op=True
        )
        return own, work

    def broadcast(self, message: bytes | None) -> bytes:
        """Send the first rank's message to all; the others pass None."""
        if self.group is None:
            assert message is not None
            return message
        length = torch.tensor([0 if message is None else len(message)])
        dist.broadcast(length, self.ranks[0], group=self.group)
        content = torch.empty(int(length), dtype=torch.uint8)
        if message:
            content = _to_tensor(message)
        dist.broadcast(content, self.ranks[0], group=self.group)
        return content.numpy().tobytes()

    def collect(self, message: bytes) -> list[bytes]:
        """Messages of all ranks, in order, on each of them."""
        lengths = self.gather(torch.tensor([len(message)])).flatten().tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(message)] = _to_tensor(message)
        every = self.gather(padded).numpy()
        return [row[:length].tobytes() for row, length in zip(every, lengths, strict=True)]

    def _all_reduce(self, tensor: Tensor, operation: Any, wait: bool) -> Any:
        if self.group is None:
            return None
        return dist.all_reduce(tensor, operation, self.group, async_op=not wait)


def _to_tensor(message: bytes) -> Tensor:
    with warnings.catch_warnings():  # that bytes cannot be written to, which nobody does
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(message, dtype=torch.uint8)
