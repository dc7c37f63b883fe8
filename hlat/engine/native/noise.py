"""Stochastic rounding to bf16 where the device has none: random bits, and what they do.

The bits that round an element are a pure function of the run's seed, the canonical name of its
tensor, its place in it and the number of the draw. So they do not depend on the layout, a resumed
run rounds as one that never stopped, and there is no generator's state to save. A hash of integers
gives them, on any device and without a word from the host.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hlat.engine.shards import Shard

_GOLDEN = -7046029254386353131
"""2^64 over the golden ratio: the step of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
_CHUNK = {"cpu": 1 << 18}
"""Elements rounded at a time, by device type: what a cache still holds, and calls do not count."""
_LARGEST_CHUNK = 1 << 24
"""Elements at a time elsewhere: bounds the memory of what is rounded."""
_INFINITY = float("inf")


@dataclass(frozen=True)
class Draw:
    """Random bits for the elements of one tensor, made where they are used.

    Attributes:
        rows: A key per row, int32 [rows, 1].
        columns: A key per column, int32 [1, width].
    """

    rows: Tensor
    columns: Tensor


@dataclass(frozen=True)
class Noise:
    """All draws for one tensor, seen as a matrix [rows, width]; a vector is one row.

    Attributes:
        rows: A key per row, of seed, canonical name and canonical row; int64 [rows, 1].
        columns: A key per canonical column; int32 [1, width].
    """

    rows: Tensor
    columns: Tensor

    def draw(self, number: Tensor) -> Draw:
        """One of the draws.

        Args:
            number: Which one; a scalar, int64, on the tensor's device.
        """
        return Draw(_mix(self.rows ^ _mix(number * _GOLDEN)).to(torch.int32), self.columns)

    def cut(self, rows: slice) -> "Noise":
        """The noise of some rows of a matrix."""
        return self if len(self.rows) == 1 else Noise(self.rows[rows], self.columns)


def make_noise(shard: Shard, seed: int, device: torch.device) -> Noise:
    """The noise of a tensor that holds a part of a parameter, as its part of the whole's."""
    if shard.columns is None:
        (part,) = shard.rows
        columns = _column_keys(part.first, part.count, device)
        return Noise(_row_keys(seed, part.name, 0, 1, device), columns)
    keys = [_row_keys(seed, part.name, part.first, part.count, device) for part in shard.rows]
    return Noise(torch.cat(keys), _column_keys(*shard.columns, device))


class Rounding:
    """Rounds a few rows at a time in memory of its own, which a core's cache then holds.

    Constants are tensors on the device: torch would wrap a Python number anew in each operation,
    which takes longer than the rest of a call.
    """

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}
        self._views: dict[tuple[str, torch.Size], Tensor] = {}
        self._constants: dict[int, Tensor] = {}

    def write(self, target: Tensor, source: Tensor, draw: Draw) -> None:
        """Fill a bf16 tensor from an fp32 one of its shape."""
        for rows, (into, values) in chunks(target, source):
            into.copy_(self.rounded(values, self.high(self.bits(draw, rows))))

    def add(self, total: Tensor, summand: Tensor, draw: Draw) -> None:
        """Add to a bf16 tensor another one; the exact sum is rounded once."""
        for rows, (into, values) in chunks(total, summand):
            exact = self.fp32("sum", into).add_(values)
            into.copy_(self.rounded(exact, self.high(self.bits(draw, rows))))

    def bits(self, draw: Draw, rows: slice) -> Tensor:
        """32 random bits for each element of some rows, int32 [rows, width].

        The inner part of a hash of 32 bits whose constants Wellons' search found least biased
        (github.com/skeeto/hash-prospector). Its first shift mixes keys, which are mixed already,
        and its last one the two halves, which `low` and `high` keep apart. The shift repeats the
        sign: half of all values do not occur between the products, and all do after the second.
        """
        keys = draw.rows[rows]
        shape = torch.Size((len(keys), draw.columns.shape[1]))
        bits, shifted = (self._take(slot, shape, keys) for slot in ("bits", "shifted"))
        torch.bitwise_xor(keys, draw.columns, out=bits).mul_(self._constant(0x7FEB352D, bits))
        bits ^= torch.bitwise_right_shift(bits, self._constant(15, bits), out=shifted)
        return bits.mul_(self._constant(-2073254261, bits))

    def high(self, bits: Tensor) -> Tensor:
        """The upper 16 bits of each element, as a number; until the next call."""
        number = self._take("high", bits.shape, bits)
        torch.bitwise_right_shift(bits, self._constant(16, bits), out=number)
        return number.bitwise_and_(self._constant(0xFFFF, bits))

    def low(self, bits: Tensor) -> Tensor:
        """The lower 16 bits of each element, as a number; in their memory."""
        return bits.bitwise_and_(self._constant(0xFFFF, bits))

    def numbers(self, draw: Draw, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Three numbers of 16 bits for each element, until the next call; any two are independent.

        The third is the exclusive or of the others: a rounding looks at one number alone.
        """
        bits = self.bits(draw, rows)
        high, low = self.high(bits), self.low(bits)
        both = torch.bitwise_xor(high, low, out=self._take("shifted", bits.shape, bits))
        return high, both, low

    def rounded(self, source: Tensor, number: Tensor) -> Tensor:
        """Round fp32 to values of bf16 like `rounded_number`, and NaN to NaN."""
        bounded = self._take("bounded", source.shape, source)
        # A carry could make a number of a NaN: this is a NaN there and less than all else
        torch.clamp(source, max=-_INFINITY, out=bounded)
        result = self.rounded_number(source, number)
        return torch.maximum(result, bounded, out=result)

    def rounded_number(self, source: Tensor, number: Tensor) -> Tensor:
        """Round fp32 to values of bf16, up or down with a probability that the distance gives.

        A carry out of the 16 bits that bf16 lacks moves to the next value away from zero; cutting
        them off moves towards it. A random number added to them carries as often as they are near.
        Values of bf16, zeros and infinities stay what they are; what rounds beyond the largest
        becomes infinite; a NaN may become anything.

        Args:
            source: fp32.
            number: int32 of the same shape, uniform in [0, 65535]; its memory is taken.

        Returns:
            fp32 of the same shape, in the memory of the number.
        """
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


def chunks(*tensors: Tensor) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """Cut tensors of one shape into a few rows each; yields which rows, and views of them."""
    matrices = [matrix(tensor) for tensor in tensors]
    rows, width = matrices[0].shape
    step = max(1, _CHUNK.get(tensors[0].device.type, _LARGEST_CHUNK) // width)
    for start in range(0, rows, step):
        chunk = slice(start, start + step)
        yield chunk, tuple(matrix[chunk] for matrix in matrices)


def matrix(tensor: Tensor) -> Tensor:
    """A matrix as it is, a vector as one row."""
    return tensor if tensor.dim() == 2 else tensor.view(1, -1)


def _row_keys(seed: int, name: str, first: int, count: int, device: torch.device) -> Tensor:
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    ordinals = torch.arange(first, first + count, device=device) * _GOLDEN
    return _mix(ordinals + int.from_bytes(digest, "little", signed=True)).unsqueeze(1)


def _column_keys(first: int, count: int, device: torch.device) -> Tensor:
    keys = _mix(torch.arange(first + 1, first + count + 1, device=device) * _GOLDEN)
    return keys.to(torch.int32).unsqueeze(0)


def _mix(keys: Tensor) -> Tensor:
    """The finalizer of SplitMix64."""
    keys = (keys ^ ((keys >> 30) & ((1 << 34) - 1))) * -4658895280553007687
    keys = (keys ^ ((keys >> 27) & ((1 << 37) - 1))) * -7723592293110705685
    return keys ^ ((keys >> 31) & ((1 << 33) - 1))
