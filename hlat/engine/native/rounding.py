"""Stochastic rounding to bf16 where the device has none: what random bits do to fp32.

It is integer arithmetic on the bits of fp32, a few rows at a time in memory of its own, which a
core's cache then holds. TorchInductor makes one loop of it, with the same result to the last bit.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from hlat.engine.native.noise import Draw

_CHUNK = {"cpu": 1 << 18}
"""Elements a thread rounds at a time, by device type: its cache holds them, and calls do not
count."""
_LARGEST_CHUNK = 1 << 24
"""Elements at a time elsewhere: bounds the memory of what is rounded."""
_INFINITY = float("inf")
_FIRST, _SECOND = 0x7FEB352D, -2073254261
"""Multipliers of a hash of 32 bits that Wellons' search found least biased
(github.com/skeeto/hash-prospector)."""


class Rounding:
    """Rounds by the bits of a draw.

    Constants are tensors on the device: torch would wrap a Python number anew in each operation,
    which takes longer than the rest of a call.
    """

    def __init__(self, compiled: bool = False) -> None:
        """Have no memory yet; `compiled`: by TorchInductor, instead of operator by operator."""
        self._compiled = compiled
        self._memory: dict[str, Tensor] = {}
        self._views: dict[tuple[str, torch.Size], Tensor] = {}
        self._constants: dict[int, Tensor] = {}

    def write(self, target: Tensor, source: Tensor, draw: Draw) -> None:
        """Fill a bf16 tensor from an fp32 one of its shape."""
        for rows, (into, values) in chunks(target, source):
            # The compiled loop leaves its result where its input was
            values = self.fp32("source", values) if self._compiled else values
            into.copy_(self.round_([values], draw, rows)[0])

    def add(self, total: Tensor, summand: Tensor, draw: Draw) -> None:
        """Add to a bf16 tensor another one; the exact sum is rounded once."""
        for rows, (into, values) in chunks(total, summand):
            exact = self.fp32("sum", into).add_(values)
            into.copy_(self.round_([exact], draw, rows)[0])

    def round_(self, values: Sequence[Tensor], draw: Draw, rows: slice) -> list[Tensor]:
        """Round some rows of one or three fp32 tensors, each by numbers of its own.

        Up or down with a probability that the distance gives: a carry out of the 16 bits that bf16
        lacks moves to the next value away from zero, and cutting them off moves towards it. A
        random number added to them carries as often as they are near. Values of bf16, zeros and
        infinities stay what they are; what rounds beyond the largest becomes infinite. A NaN stays
        one in the first tensor and may become anything in the others: in an update, a NaN in a
        moment is one in its weight, too, and stays there.

        Args:
            values: Their memory may be taken.
            draw: The bits.
            rows: Which of the draw's rows they are.

        Returns:
            Values of bf16, in fp32, until the next call.
        """
        if self._compiled:
            contents = [value.view(torch.int32) for value in values]
            _compiled_round_()(contents, draw.rows[rows], draw.columns)
            return [*values]
        bits = self.bits(draw, rows)
        numbers = [self._high(bits)] if len(values) == 1 else self.numbers(bits)
        first = self._guarded(values[0], numbers[0])
        return [first, *map(self._rounded, values[1:], numbers[1:])]

    def bits(self, draw: Draw, rows: slice) -> Tensor:
        """32 random bits for each element of some rows, int32 [rows, width].

        The inner part of the hash. Its first shift mixes keys, which are mixed already, and its
        last one the two halves, which roundings keep apart. The shift repeats the sign: half of all
        values do not occur between the products, and all do after the second.
        """
        keys = draw.rows[rows]
        shape = torch.Size((len(keys), draw.columns.shape[1]))
        bits, shifted = (self._take(slot, shape, keys) for slot in ("bits", "shifted"))
        torch.bitwise_xor(keys, draw.columns, out=bits).mul_(self._constant(_FIRST, bits))
        bits ^= torch.bitwise_right_shift(bits, self._constant(15, bits), out=shifted)
        return bits.mul_(self._constant(_SECOND, bits))

    def numbers(self, bits: Tensor) -> list[Tensor]:
        """Three numbers of 16 bits for each element, until the next call; any two are independent.

        The third is the exclusive or of the others: a rounding looks at one number alone.
        """
        high, low = self._high(bits), bits.bitwise_and_(self._constant(0xFFFF, bits))
        both = torch.bitwise_xor(high, low, out=self._take("shifted", bits.shape, bits))
        return [high, both, low]

    def _high(self, bits: Tensor) -> Tensor:
        """The upper 16 bits of each element, as a number."""
        number = self._take("high", bits.shape, bits)
        torch.bitwise_right_shift(bits, self._constant(16, bits), out=number)
        return number.bitwise_and_(self._constant(0xFFFF, bits))

    def _guarded(self, source: Tensor, number: Tensor) -> Tensor:
        """Round, and leave a NaN what it is: a carry could make a number of it."""
        bounded = self._take("bounded", source.shape, source)
        torch.clamp(source, max=-_INFINITY, out=bounded)  # a NaN there, and less than all else
        result = self._rounded(source, number)
        return torch.maximum(result, bounded, out=result)

    def _rounded(self, source: Tensor, number: Tensor) -> Tensor:
        """Round, in the memory of the number."""
        number += source.view(torch.int32)
        return number.bitwise_and_(self._constant(-65536, number)).view(torch.float32)

    def fp32(self, slot: str, source: Tensor) -> Tensor:
        """A copy in fp32, until the next of that name."""
        return self._take(slot, source.shape, source, torch.float32).copy_(source)

    def _constant(self, value: int, like: Tensor) -> Tensor:
        if value not in self._constants:
            self._constants[value] = torch.tensor(value, dtype=torch.int32, device=like.device)
        return self._constants[value]

    def _take(
        self, slot: str, shape: torch.Size, like: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Memory for a tensor of that shape; a new one each time would be paged in each time."""
        if (slot, shape) not in self._views:
            if slot not in self._memory or self._memory[slot].numel() < shape.numel():
                self._memory[slot] = like.new_empty(shape.numel(), dtype=dtype)
            self._views[slot, shape] = self._memory[slot][: shape.numel()].view(shape)
        return self._views[slot, shape]


@cache
def _compiled_round_() -> Callable[[list[Tensor], Tensor, Tensor], None]:
    return torch.compile(_round_, fullgraph=True, dynamic=True)


def _round_(contents: list[Tensor], rows: Tensor, columns: Tensor) -> None:
    """`Rounding.round_` on the bits of fp32, in their memory.

    They come as integers, since TorchInductor makes no vector code of a view as another type.
    """
    bits = (rows ^ columns) * _FIRST
    bits = (bits ^ (bits >> 15)) * _SECOND
    high, low = (bits >> 16) & 0xFFFF, bits & 0xFFFF
    for i, (content, number) in enumerate(zip(contents, (high, high ^ low, low), strict=False)):
        result = content + number
        if i == 0:
            is_nan = (content & 0x7FFFFFFF) > 0x7F800000
            result = torch.where(is_nan, content | 0x400000, result)
        content.copy_(result & -65536)


def chunks(*tensors: Tensor) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """Cut tensors of one shape into a few rows each; yields which rows, and views of them."""
    matrices = [matrix(tensor) for tensor in tensors]
    rows, width = matrices[0].shape
    of_thread = _CHUNK.get(tensors[0].device.type)
    elements = of_thread * torch.get_num_threads() if of_thread else _LARGEST_CHUNK
    step = max(1, elements // width)
    for start in range(0, rows, step):
        chunk = slice(start, start + step)
        yield chunk, tuple(matrix[chunk] for matrix in matrices)


def matrix(tensor: Tensor) -> Tensor:
    """A matrix as it is, a vector as one row."""
    return tensor if tensor.dim() == 2 else tensor.view(1, -1)
