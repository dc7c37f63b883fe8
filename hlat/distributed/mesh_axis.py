"""Collectives over the ranks along one axis of the device mesh.

All communication uses a `MeshAxis`. Collectives over an axis of one rank do nothing, so that the
callers are the same for one process and for thousands.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renames both functions and warns of the old names
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class MeshAxis:
    """The ranks along one axis of the mesh through this rank.

    Args:
        ranks: Global ranks along the axis, in order.
        rank: Global rank of this process; the attribute is its index along the axis.
        group: Process group of the ranks; not used for one rank.
    """

    def __init__(self, ranks: Sequence[int], rank: int, group: Any = None) -> None:
        self.ranks = tuple(ranks)
        self.rank, self.size = self.ranks.index(rank), len(ranks)
        self.group = group if self.size > 1 else None

    def all_reduce(self, tensor: Tensor, wait: bool = True) -> Any:
        """Sum a tensor over all ranks in place; return the work handle if not waited for."""
        if self.group is None:
            return None
        return dist.all_reduce(tensor, dist.ReduceOp.SUM, self.group, async_op=not wait)

    def all_reduce_max(self, tensor: Tensor) -> None:
        """Take the element-wise maximum over all ranks in place."""
        if self.group is not None:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, self.group)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack the tensors of all ranks; [...] to [size, ...]."""
        if self.group is None:
            return torch.stack([tensor])
        output = tensor.new_empty((self.size, *tensor.shape))
        self.all_gather_into_tensor(output, tensor.contiguous())
        return output

    def all_gather_into_tensor(self, output_tensor: Tensor, input_tensor: Tensor) -> None:
        """Gather all ranks' tensors into a contiguous one; the input may be a view of it."""
        if self.group is not None:
            _all_gather(output_tensor.view(-1), input_tensor.reshape(-1), group=self.group)
        elif output_tensor.data_ptr() != input_tensor.data_ptr():
            output_tensor.view(-1).copy_(input_tensor.reshape(-1))

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Send `tensor[i]` to the i-th rank; stack what the ranks send to this one; [size, ...]."""
        output = torch.empty_like(tensor)
        dist.all_to_all_single(output.view(-1), tensor.view(-1), group=self.group)
        return output

    def all_to_all_async(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        output_splits: list[int],
        input_splits: list[int],
    ) -> Any:
        """Start to send parts of different sizes to each rank; return the work handle."""
        return dist.all_to_all_single(
            output_tensor, input_tensor, output_splits, input_splits, self.group, async_op=True
        )

    def all_to_all_rows(
        self, rows: Tensor, input_splits: list[int], output_splits: list[int]
    ) -> Tensor:
        """Send consecutive rows of different numbers to each rank; return the received ones.

        Args:
            rows: Rows for the first rank, then for the next, [sum(input_splits), ...].
            input_splits: Rows for each rank.
            output_splits: Rows from each rank.
        """
        output = rows.new_empty((sum(output_splits), *rows.shape[1:]))
        self.all_to_all_async(output, rows.contiguous(), output_splits, input_splits).wait()
        return output

    def send_recv(self, tensor: Tensor, peer: int) -> Tensor:
        """Exchange tensors with the rank at index `peer` and return its tensor."""
        received, peer_rank = torch.empty_like(tensor), self.ranks[peer]
        operations = [
            dist.P2POp(dist.isend, tensor, peer_rank, self.group),
            dist.P2POp(dist.irecv, received, peer_rank, self.group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received

    def reduce_scatter(self, input_tensor: Tensor) -> Tensor:
        """Sum over all ranks and return this rank's part; [size, ...] to [...]."""
        return self._reduce_scatter(input_tensor, async_op=False)[0]  # torch.compile needs False

    def reduce_scatter_async(self, input_tensor: Tensor) -> tuple[Tensor, Any]:
        """Start `reduce_scatter`; return its output and work. Do not modify the input before."""
        return self._reduce_scatter(input_tensor, async_op=True)

    def _reduce_scatter(self, input_tensor: Tensor, async_op: bool) -> tuple[Tensor, Any]:
        output = input_tensor.new_empty(input_tensor.shape[1:])
        input_flat = input_tensor.contiguous().view(-1)
        work = _reduce_scatter(output.view(-1), input_flat, group=self.group, async_op=async_op)
        return output, work

    def any(self, flag: bool, device: torch.device | None = None) -> bool:
        """Return True if the flag is set on any rank.

        Host flags use log2(size) messages per rank, because gloo's all-reduce is a ring of twice
        `size` messages that wait for each other. Devices all-reduce the flag.
        """
        result = torch.tensor([int(flag)], device=device)
        if device is not None and device.type != "cpu":
            self.all_reduce_max(result)
            return bool(result)
        distance = 1
        while distance < self.size:
            received = self._shift(result, distance)
            result = torch.maximum(result, received)
            distance *= 2
        return bool(result)

    def _shift(self, tensor: Tensor, distance: int) -> Tensor:
        """Send a tensor to the rank `distance` after this one; return that from before it."""
        received = torch.empty_like(tensor)
        target, source = (self.ranks[(self.rank + d) % self.size] for d in (distance, -distance))
        work = dist.isend(tensor, target, self.group)
        dist.recv(received, source, self.group)
        assert work is not None
        work.wait()
        return received

    def broadcast(self, message: bytes | None) -> bytes:
        """Return the first rank's message on all ranks; the others pass None."""
        messages = [message]
        if self.group is not None:
            dist.broadcast_object_list(messages, self.ranks[0], self.group, torch.device("cpu"))
        assert messages[0] is not None
        return messages[0]

    def all_gather_object(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, in order, on each rank."""
        messages = [message] * self.size
        if self.group is not None:
            dist.all_gather_object(messages, message, self.group)
        return messages
