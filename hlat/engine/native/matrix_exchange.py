"""Assembly of matrices from the shards of several ranks, on one owner for each matrix.

The matrices are divided among the ranks that share them, balanced by the cost of their updates. In
each step an owner receives the slices of its matrices, and returns the results to all ranks that
have slices. The next matrices are in transit while an owner computes.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from hlat.distributed.mesh_axis import MeshAxis

_BATCH_NUMEL = 1 << 24
"""Elements per rank of the matrices of a batch, unless one matrix has more."""
Rectangle = tuple[int, int, int, int]
"""First row, number of rows, first column and number of columns."""


@dataclass(frozen=True)
class MatrixSlice:
    """Slice of a matrix on this rank.

    Attributes:
        name: Name of the matrix.
        rectangle: Its rows and columns.
        is_main_replica: True on one of the ranks that have the slice. The main replicas together
            are the whole matrix.
    """

    name: str
    rectangle: Rectangle
    is_main_replica: bool


@dataclass(frozen=True)
class _Holder:
    """Rank that has a slice, and the index of the slice in the list of that rank."""

    rank: int
    index: int
    rectangle: Rectangle
    is_main_replica: bool


@dataclass(frozen=True)
class _Transfer:
    """Transfer of a slice between two ranks along the axis, or within a rank.

    Attributes:
        sender: Rank with the tensor.
        receiver: Rank that needs it.
        name: Name of the matrix.
        rectangle: Rows and columns of the slice.
        index: Index of the slice in the list of the rank that has it: the sender of a gradient, and
            the receiver of a result.
    """

    sender: int
    receiver: int
    name: str
    rectangle: Rectangle
    index: int

    @property
    def numel(self) -> int:
        return self.rectangle[1] * self.rectangle[3]


class _AllToAll:
    """Transfers of one all-to-all that start or end on this rank."""

    def __init__(self, axis: MeshAxis, device: torch.device, transfers: list[_Transfer]) -> None:
        self._axis, self._device = axis, device
        rank, others = axis.rank, [t for t in transfers if t.sender != t.receiver]
        self._local = [t for t in transfers if t.sender == t.receiver == rank]
        self._sent = sorted(
            (t for t in others if t.sender == rank), key=lambda transfer: transfer.receiver
        )
        self._received = sorted(
            (t for t in others if t.receiver == rank), key=lambda transfer: transfer.sender
        )
        self._input_splits, self._output_splits = [0] * axis.size, [0] * axis.size
        for transfer in self._sent:
            self._input_splits[transfer.receiver] += transfer.numel
        for transfer in self._received:
            self._output_splits[transfer.sender] += transfer.numel

    def start(
        self, get_tensor: Callable[[_Transfer], Tensor], dtype: torch.dtype
    ) -> Callable[[], Iterator[tuple[_Transfer, Tensor]]]:
        """Start the transfers; return a function that waits and yields those to this rank."""
        local = [(t, get_tensor(t).reshape(t.rectangle[1::2])) for t in self._local]
        if self._axis.size == 1:
            return lambda: iter(local)
        empty = torch.empty(0, dtype=dtype, device=self._device)
        flat = torch.cat([empty, *(get_tensor(t).reshape(-1).to(dtype) for t in self._sent)])
        output = empty.new_empty(sum(self._output_splits))
        splits = self._output_splits, self._input_splits
        work = self._axis.all_to_all_async(output, flat, *splits)

        def finish() -> Iterator[tuple[_Transfer, Tensor]]:
            work.wait()
            yield from local
            tensors = torch.split(output, [t.numel for t in self._received])
            for transfer, tensor in zip(self._received, tensors, strict=True):
                yield transfer, tensor.view(transfer.rectangle[1::2])

        return finish


class MatrixExchange:
    """Plan of the transfers of a step; all ranks along an axis create it.

    Attributes:
        owned: Shape of each matrix that this rank owns.
    """

    def __init__(
        self,
        axis: MeshAxis,
        slices: Sequence[MatrixSlice],
        costs: Mapping[str, float],
        device: torch.device,
        expert_names: Collection[str] = (),
    ) -> None:
        """Plan the transfers of the slices of this rank.

        Args:
            axis: Ranks that share the matrices.
            slices: Slices of this rank.
            costs: Cost of the update by matrix.
            device: Device of the matrices.
            expert_names: Matrices of which the owner must have a slice.
        """
        self._device = device
        message = json.dumps(
            [[s.name, s.rectangle, s.is_main_replica, costs[s.name]] for s in slices]
        )
        messages = [json.loads(each) for each in axis.all_gather_object(message.encode())]
        holders: dict[str, list[_Holder]] = {}
        all_costs: dict[str, float] = {}
        for rank, rows in enumerate(messages):
            for index, (name, rectangle, is_main, cost) in enumerate(rows):
                holder = _Holder(rank, index, tuple(rectangle), is_main)
                holders.setdefault(name, []).append(holder)
                all_costs[name] = cost
        shapes = {name: _compute_shape(each) for name, each in holders.items()}
        candidates = {
            name: {one.rank for one in each}
            for name, each in holders.items()
            if name in expert_names
        }
        owners = assign_owners(all_costs, axis.size, candidates)
        self.owned = {name: shape for name, shape in shapes.items() if owners[name] == axis.rank}
        self._batches: list[tuple[list[str], _AllToAll, _AllToAll]] = []
        for names in _divide([*owners], shapes, _BATCH_NUMEL * axis.size):
            gathers, scatters = list[_Transfer](), list[_Transfer]()
            for name in names:
                gathers += _plan_gathers(name, owners[name], holders[name])
                scatters += [
                    _Transfer(owners[name], one.rank, name, one.rectangle, one.index)
                    for one in holders[name]
                ]
            owned = [name for name in names if name in self.owned]
            gather, scatter = (_AllToAll(axis, device, each) for each in (gathers, scatters))
            self._batches.append((owned, gather, scatter))

    def update(
        self,
        slices: Sequence[Tensor],
        compute: Callable[[str, Tensor], Tensor],
        result_dtype: torch.dtype,
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the index of each slice of this rank, and its part of `compute(name, matrix)`.

        Args:
            slices: Slices of the matrices, in the order of the constructor.
            compute: Returns the result for an fp32 matrix that this rank owns.
            result_dtype: dtype of the results.
        """
        gathers = (
            gather.start(lambda transfer: slices[transfer.index], torch.float32)
            for _, gather, _ in self._batches
        )
        gathered, previous = next(gathers), None
        for names, _, scatter in self._batches:
            following = next(gathers, None)
            matrices = {
                name: torch.empty(self.owned[name], dtype=torch.float32, device=self._device)
                for name in names
            }
            for transfer, part in gathered():
                _get_rectangle(matrices[transfer.name], transfer.rectangle).copy_(part)
            results = {name: compute(name, matrix) for name, matrix in matrices.items()}
            scattered = scatter.start(partial(_select, results), result_dtype)
            if previous is not None:
                yield from _iterate_indices(previous())
            previous = scattered
            if following is not None:
                gathered = following
        assert previous is not None
        yield from _iterate_indices(previous())


def assign_owners(
    costs: Mapping[str, float],
    num_ranks: int,
    candidates: Mapping[str, Collection[int]] = MappingProxyType({}),
) -> dict[str, int]:
    """Return the owner of each matrix: the most expensive ones first, to the least loaded rank.

    The matrices are in this order, so that each batch of them has work for all ranks. The owner is
    one of the candidates of the matrix, if it has some.
    """
    loads, owners = [0.0] * num_ranks, dict[str, int]()
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        ranks = candidates.get(name, range(num_ranks))
        owners[name] = min(ranks, key=lambda rank: (loads[rank], rank))
        loads[owners[name]] += costs[name]
    return owners


def _divide(
    names: Sequence[str], shapes: Mapping[str, tuple[int, int]], max_numel: int
) -> list[list[str]]:
    """Divide matrices into batches of at most `max_numel` elements, or of one matrix."""
    batches, numel = [list[str]()], 0
    for name in names:
        num_rows, num_columns = shapes[name]
        if batches[-1] and numel + num_rows * num_columns > max_numel:
            batches.append([])
            numel = 0
        batches[-1].append(name)
        numel += num_rows * num_columns
    return batches


def _plan_gathers(name: str, owner: int, holders: Sequence[_Holder]) -> Iterator[_Transfer]:
    """Yield a transfer per slice: from the owner if it has the slice, else from another rank."""
    for rectangle in [one.rectangle for one in holders if one.is_main_replica]:
        senders = {one.rank: one.index for one in holders if one.rectangle == rectangle}
        ranks = sorted(senders)
        sender = owner if owner in senders else ranks[owner % len(ranks)]
        yield _Transfer(sender, owner, name, rectangle, senders[sender])


def _compute_shape(holders: Sequence[_Holder]) -> tuple[int, int]:
    rectangles = [one.rectangle for one in holders]
    return max(r[0] + r[1] for r in rectangles), max(r[2] + r[3] for r in rectangles)


def _iterate_indices(
    received: Iterator[tuple[_Transfer, Tensor]],
) -> Iterator[tuple[int, Tensor]]:
    return ((transfer.index, part) for transfer, part in received)


def _select(results: Mapping[str, Tensor], transfer: _Transfer) -> Tensor:
    return _get_rectangle(results[transfer.name], transfer.rectangle)


def _get_rectangle(matrix: Tensor, rectangle: Rectangle) -> Tensor:
    first_row, num_rows, first_column, num_columns = rectangle
    return matrix[first_row : first_row + num_rows, first_column : first_column + num_columns]
