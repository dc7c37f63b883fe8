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
_CHUNK = {"cpu": 1 << 17}
"""Elements rounded at a time, by device type: what stays in a core's cache."""
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
        return Noise(_row_keys(seed, part.name, 0, 1, device), _column_keys(0, part.count, device))
    keys = [_row_keys(seed, part.name, part.first, part.count, device) for part in shard.rows]
    return Noise(torch.cat(keys), _column_keys(*shard.columns, device))


class Rounding:
    """Rounds a few rows at a time in memory of its own, which a core's cache then holds."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def write(self, target: Tensor, source: Tensor, draw: Draw) -> None:
        """Fill a bf16 tensor from an fp32 one of its shape."""
        for rows, (into, values) in chunks(target, source):
            into.copy_(self.rounded(values, self.low(self.bits(draw, rows))))

    def add(self, total: Tensor, summand: Tensor, draw: Draw) -> None:
        """Add to a bf16 tensor another one; the exact sum is rounded once."""
        for rows, (into, values) in chunks(total, summand):
            exact = self.fp32("sum", into).add_(values)
            into.copy_(self.rounded(exact, self.low(self.bits(draw, rows))))

    def bits(self, draw: Draw, rows: slice) -> Tensor:
        """32 random bits for each element of some rows, int32 [rows, width].

        The finalizer of a hash of 32 bits whose constants Wellons' search found least biased
        (github.com/skeeto/hash-prospector), without its first shift: the keys are mixed already.
        """
        keys = draw.rows[rows]
        like = keys.expand(-1, draw.columns.shape[1])
        bits, shifted = (self._take(slot, like, torch.int32) for slot in ("bits", "shifted"))
        torch.bitwise_xor(keys, draw.columns, out=bits).mul_(0x7FEB352D)
        bits ^= torch.bitwise_right_shift(bits, 15, out=shifted).bitwise_and_(0x1FFFF)
        bits.mul_(-2073254261)
        bits ^= torch.bitwise_right_shift(bits, 16, out=shifted).bitwise_and_(0xFFFF)
        return bits

    def low(self, bits: Tensor) -> Tensor:
        """The lower of the two numbers of 16 bits in each element, until the next call."""
        return torch.bitwise_and(bits, 0xFFFF, out=self._take("number", bits, torch.int32))

    def high(self, bits: Tensor) -> Tensor:
        """The upper of the two numbers of 16 bits in each element, until the next call."""
        number = self._take("number", bits, torch.int32)
        return torch.bitwise_right_shift(bits, 16, out=number).bitwise_and_(0xFFFF)

    def rounded(self, source: Tensor, number: Tensor) -> Tensor:
        """Round fp32 to values of bf16, up or down with a probability that the distance gives.

        A carry out of the 16 bits that bf16 lacks moves to the next value away from zero; cutting
        them off moves towards it. A random number added to them carries as often as they are near.
        Values of bf16, zeros and infinities stay what they are; what rounds beyond the largest
        becomes infinite.

        Args:
            source: fp32.
            number: int32 of the same shape, uniform in [0, 65535]; its memory is taken.

        Returns:
            fp32 of the same shape, until the next call.
        """
        bounded = self._take("bounded", source, torch.float32)
        result = number.add_(source.view(torch.int32)).bitwise_and_(-65536).view(torch.float32)
        # A carry could make a number of a NaN: this is a NaN there and less than all else
        torch.clamp(source, max=-_INFINITY, out=bounded)
        return torch.maximum(result, bounded, out=bounded)

    def fp32(self, slot: str, source: Tensor) -> Tensor:
        """A copy in fp32, until the next of that name."""
        return self._take(slot, source, torch.float32).copy_(source)

    def _take(self, slot: str, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory for a tensor of that shape; a new one each time would be paged in each time."""
        if slot not in self._memory or self._memory[slot].numel() < like.numel():
            self._memory[slot] = torch.empty(like.numel(), dtype=dtype, device=like.device)
        return self._memory[slot][: like.numel()].view(like.shape)


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
