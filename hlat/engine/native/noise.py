"""Random bits for stochastic rounding to bf16 where the device has none.

The bits that round an element are a pure function of the run's seed, the canonical name of its
tensor, its place in it and the number of the draw. So they do not depend on the layout, a resumed
run rounds as one that never stopped, and there is no generator's state to save. A hash of integers
gives them, on any device and without a word from the host.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from hlat.engine.shards import Shard

_GOLDEN = -7046029254386353131
"""2^64 over the golden ratio: the step of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""


@dataclass(frozen=True)
class Draw:
    """Random numbers for the elements of some tensors of one shape, made where they are used.

    Attributes:
        rows: Of each tensor a key per row, int32 [tensors, rows, 1].
        columns: A key per column, odd, int32 [1, width].
    """

    rows: Tensor
    columns: Tensor


@dataclass(frozen=True)
class Noise:
    """All draws for one tensor, seen as a matrix [rows, width]; a vector is one row.

    Attributes:
        rows: A key per row, of seed, canonical name and canonical row; int64 [rows, 1].
        columns: A key per canonical column, odd; int32 [1, width].
    """

    rows: Tensor
    columns: Tensor

    def draw(self, numbers: Tensor) -> Draw:
        """Some of the draws, each for a tensor of its own.

        Args:
            numbers: Which ones; int64, [tensors] or a scalar, on the tensor's device.
        """
        multipliers = _mix(numbers * _GOLDEN).bitwise_or_(1).view(-1, 1, 1)
        return Draw((self.rows * multipliers >> 32).to(torch.int32), self.columns)

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


def _row_keys(seed: int, name: str, first: int, count: int, device: torch.device) -> Tensor:
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    ordinals = torch.arange(first, first + count, device=device) * _GOLDEN
    return _mix(ordinals + int.from_bytes(digest, "little", signed=True)).unsqueeze(1)


def _column_keys(first: int, count: int, device: torch.device) -> Tensor:
    keys = _mix(torch.arange(first + 1, first + count + 1, device=device) * _GOLDEN)
    return keys.to(torch.int32).bitwise_or_(1).unsqueeze(0)


def _mix(keys: Tensor) -> Tensor:
    """The finalizer of SplitMix64."""
    keys = (keys ^ ((keys >> 30) & ((1 << 34) - 1))) * -4658895280553007687
    keys = (keys ^ ((keys >> 27) & ((1 << 37) - 1))) * -7723592293110705685
    return keys ^ ((keys >> 31) & ((1 << 33) - 1))
