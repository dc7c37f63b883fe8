"""Counter-based random bits for stochastic rounding to bf16 on devices without it.

The bits of an element are a pure function of the seed, the canonical name of its tensor, its index
in that tensor and a counter. They are independent of the layout, a resumed run repeats them, and
no generator state is saved. They come from an integer hash that runs on any device.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

_GOLDEN_GAMMA = -7046029254386353131
"""2^64 over the golden ratio: the step of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""


@dataclass(frozen=True)
class RandomBits:
    """Random bits for tensors of one shape as keys, expanded where they are used.

    Attributes:
        row_keys: One key per tensor and row, int32 [tensors, rows, 1]; [tensors, 1, width] for a
            vector of several canonical parameters.
        column_keys: One odd key per column, int32 [1, width].
    """

    row_keys: Tensor
    column_keys: Tensor


@dataclass(frozen=True)
class RandomBitsGenerator:
    """Generator of random bits for one matrix [rows, width]; a vector is one row.

    Attributes:
        row_keys: Hash of seed, canonical name and canonical row, int64 [rows, 1]; [1, width] for a
            vector of several canonical parameters.
        column_keys: Odd hash of the canonical column, int32 [1, width].
    """

    row_keys: Tensor
    column_keys: Tensor

    def generate(self, counters: Tensor) -> RandomBits:
        """Return random bits for one tensor per counter.

        Args:
            counters: int64, [tensors] or a scalar, on the device of the keys.
        """
        multipliers = _splitmix64(counters * _GOLDEN_GAMMA).bitwise_or_(1).view(-1, 1, 1)
        return RandomBits((self.row_keys * multipliers >> 32).to(torch.int32), self.column_keys)

    def select_rows(self, rows: slice) -> "RandomBitsGenerator":
        """Return the generator of some rows of a matrix; a vector's generator is unchanged."""
        if len(self.row_keys) == 1:
            return self
        return RandomBitsGenerator(self.row_keys[rows], self.column_keys)


def build_random_bits_generator(
    row_ranges: Iterable[tuple[str, int, int]],
    columns: tuple[int, int] | None,
    seed: int,
    device: torch.device,
) -> RandomBitsGenerator:
    """Return the generator of a tensor composed of parts of canonical parameters.

    A part is a canonical name, first row and number of rows, or elements of a vector. Columns are
    the first canonical column and the number of columns; None for a vector.
    """
    if columns is None:
        parts = [*row_ranges]
        row_keys = [_build_row_keys(seed, name, 0, 1, device) for name, _, _ in parts]
        column_keys = [_build_column_keys(start, count, device) for _, start, count in parts]
        if len(parts) > 1:  # a key per element
            row_keys = [
                key.expand(1, keys.shape[1])
                for key, keys in zip(row_keys, column_keys, strict=True)
            ]
        return RandomBitsGenerator(torch.cat(row_keys, 1), torch.cat(column_keys, 1))
    keys = [_build_row_keys(seed, *row_range, device) for row_range in row_ranges]
    return RandomBitsGenerator(torch.cat(keys), _build_column_keys(*columns, device))


def _build_row_keys(
    seed: int, name: str, start: int, num_rows: int, device: torch.device
) -> Tensor:
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    rows = torch.arange(start, start + num_rows, device=device) * _GOLDEN_GAMMA
    return _splitmix64(rows + int.from_bytes(digest, "little", signed=True)).unsqueeze(1)


def _build_column_keys(start: int, num_columns: int, device: torch.device) -> Tensor:
    columns = torch.arange(start + 1, start + num_columns + 1, device=device) * _GOLDEN_GAMMA
    return _splitmix64(columns).to(torch.int32).bitwise_or_(1).unsqueeze(0)


def _splitmix64(keys: Tensor) -> Tensor:
    """Apply the finalizer of SplitMix64."""
    keys = (keys ^ ((keys >> 30) & ((1 << 34) - 1))) * -4658895280553007687
    keys = (keys ^ ((keys >> 27) & ((1 << 37) - 1))) * -7723592293110705685
    return keys ^ ((keys >> 31) & ((1 << 33) - 1))
