"""Stochastic rounding to bf16 where the device has none: what random numbers do to fp32.

It is integer arithmetic on the bits of fp32, a few rows at a time in memory of its own, which a
core's cache then holds. TorchInductor makes one loop of it, with the same result to the last bit.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from hlat.engine.native.noise import Draw

_CHUNK = {"cpu": 1 << 17}
"""Elements of a tensor that a thread rounds at a time, by device type: its cache holds them."""
_COMPILED_CHUNK = {"cpu": 1 << 18}
"""The same where TorchInductor rounds, whose calls take longer."""
_LARGEST_CHUNK = 1 << 24
"""Elements at a time elsewhere: bounds the memory of what is rounded."""
_INFINITY, _NAN = float("inf"), float("nan")


@dataclass(frozen=True)
class Stack:
    """Matrices of one shape, in fp32, in one piece of memory.

    Attributes:
        each: The matrices.
        contents: The bits of all of them, int32 [matrices, rows, width].
    """

    each: list[Tensor]
    contents: Tensor


class Rounding:
    """Rounds by the numbers of a draw.

    Constants are tensors on the device: torch would wrap a Python number anew in each operation,
    which takes longer than the rest of a call.
    """

    def __init__(self, compiled: bool = False) -> None:
        """Have no memory yet; `compiled`: by TorchInductor, instead of operator by operator."""
        self._compiled = compiled
        self._memory: dict[str, Tensor] = {}
        self._stacks: dict[tuple[str, int, torch.Size], Stack] = {}
        self._constants: dict[int, Tensor] = {}

    def write(self, target: Tensor, source: Tensor, draw: Draw) -> None:
        """Fill a bf16 tensor from an fp32 one of its shape."""
        for rows, (into, values) in self.chunks(target, source):
            copy = self.take("rounded", 1, values.shape, values.device)
            copy.each[0].copy_(values)
            self.round_(copy, draw, rows)
            into.copy_(copy.each[0])

    def add(self, total: Tensor, summand: Tensor, draw: Draw) -> None:
        """Add to a bf16 tensor another one; the exact sum is rounded once."""
        for rows, (into, values) in self.chunks(total, summand):
            exact = self.take("rounded", 1, values.shape, values.device)
            exact.each[0].copy_(into).add_(values)
            self.round_(exact, draw, rows)
            into.copy_(exact.each[0])

    def round_(self, stack: Stack, draw: Draw, rows: slice) -> None:
        """Let some rows of one or more fp32 tensors be values of bf16.

        Up or down with a probability that the distance gives: a carry out of the 16 bits that bf16
        lacks moves to the next value away from zero, and cutting them off moves towards it. A
        random number added to them carries as often as they are near. Values of bf16, zeros and
        infinities stay what they are; what rounds beyond the largest becomes infinite. A NaN stays
        one in the first tensor and may become anything in the others: in an update, a NaN in a
        moment is one in its weight, too, and stays there.

        Args:
            stack: One tensor for each of the draw's.
            draw: The numbers.
            rows: Which of the draw's rows they are.
        """
        keys = draw.rows[:, rows]
        if self._compiled:
            _compiled_round_()(stack.contents, keys, draw.columns)
            return
        # The one NaN that comes of it has room for a number: no carry makes a number of it
        stack.each[0].nan_to_num_(nan=_NAN, posinf=_INFINITY, neginf=-_INFINITY)
        stack.contents.add_(self.numbers(keys, draw.columns))
        stack.contents.bitwise_and_(self._constant(-65536, keys))

    def numbers(self, rows: Tensor, columns: Tensor) -> Tensor:
        """A number of 16 bits for each element, until the next call.

        It is the upper half of the product of two keys (multiplicative hashing: Dietzfelbinger et
        al., J. Algorithms 25, 1997). As the key of a column is odd, each element has every number
        for equally many keys of its row.

        Args:
            rows: Keys, int32 [tensors, rows, 1].
            columns: Keys, int32 [1, width].

        Returns:
            int32 [tensors, rows, width].
        """
        shape = torch.Size((rows.shape[1], columns.shape[1]))
        numbers = self.take("numbers", len(rows), shape, rows.device).contents
        torch.mul(rows, columns, out=numbers)
        numbers.bitwise_right_shift_(self._constant(16, rows))
        return numbers.bitwise_and_(self._constant(0xFFFF, rows))

    def take(self, slot: str, count: int, shape: torch.Size, device: torch.device) -> Stack:
        """So many matrices of that shape, whose content the next call of that name may overwrite.

        Their memory stays: new memory each time would be paged in each time.
        """
        if (slot, count, shape) not in self._stacks:
            size = count * shape.numel()
            if slot not in self._memory or self._memory[slot].numel() < size:
                self._memory[slot] = torch.empty(size, device=device)
                self._stacks.clear()  # which hold what was there before
            whole = self._memory[slot][:size].view(count, *shape)
            self._stacks[slot, count, shape] = Stack([*whole], whole.view(torch.int32))
        return self._stacks[slot, count, shape]

    def chunks(self, *tensors: Tensor) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
        """Cut tensors of one shape into a few rows each; yields which rows, and views of them."""
        matrices = [matrix(tensor) for tensor in tensors]
        rows, width = matrices[0].shape
        of_thread = (_COMPILED_CHUNK if self._compiled else _CHUNK).get(tensors[0].device.type)
        elements = of_thread * torch.get_num_threads() if of_thread else _LARGEST_CHUNK
        step = max(1, elements // width)
        pieces = zip(*(torch.split(matrix, step) for matrix in matrices), strict=True)
        return zip((slice(i, i + step) for i in range(0, rows, step)), pieces, strict=True)

    def _constant(self, value: int, like: Tensor) -> Tensor:
        if value not in self._constants:
            self._constants[value] = torch.tensor(value, dtype=torch.int32, device=like.device)
        return self._constants[value]


@cache
def _compiled_round_() -> Callable[[Tensor, Tensor, Tensor], None]:
    return torch.compile(_round_, fullgraph=True, dynamic=True)


def _round_(contents: Tensor, rows: Tensor, columns: Tensor) -> None:
    """`Rounding.round_` on the bits of fp32, in their memory.

    They come as integers, since TorchInductor makes no vector code of a view as another type.
    """
    is_nan = (contents & 0x7FFFFFFF) > 0x7F800000
    carried = contents + (((rows * columns) >> 16) & 0xFFFF)
    contents.copy_(torch.where(is_nan, contents | 0x400000, carried) & -65536)


def matrix(tensor: Tensor) -> Tensor:
    """A matrix as it is, a vector as one row."""
    return tensor if tensor.dim() == 2 else tensor.view(1, -1)
