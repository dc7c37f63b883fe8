"""Whether ranks that hold copies of a slice of the state hold the same bits.

A bit that flips in one rank's memory is finite, moves no loss that anybody would notice, and stays:
the sums of gradients change all copies alike. Which slices are copies follows from what each rank
holds, so nothing here knows layouts.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hlat.checkpoint.chunk import Chunk
from hlat.engine.axis import Axis
from hlat.engine.interface import Disagreement

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compare(chunks: Iterable[Chunk], axes: Iterable[Axis]) -> list[Disagreement]:
    """The slices that this rank and others along the axes hold differently; all ranks call it."""
    held = {(chunk.name, chunk.offset, chunk.size): chunk.tensor for chunk in chunks}
    wanted = [axis for axis in axes if axis.size > 1]
    if not wanted:
        return []
    own = torch.stack([digest(tensor) for tensor in held.values()]).cpu().numpy()
    found = []
    for axis in wanted:
        messages = axis.collect(_keys(held).tobytes() + own.tobytes())
        if len({*messages}) > 1:
            found += _differences([name for name, _, _ in held], messages, axis)
    return found


def digest(tensor: Tensor) -> Tensor:
    """A number of the bits of a tensor, int64: another one if any element is changed.

    It is the sum of the bits of each row, read as integers, times odd numbers, modulo 2^64: what a
    change of one integer adds to its row is lost in none of these steps, and rows that change
    places are noticed as well. Eight bytes at a time are ten times as fast on a CPU.
    """
    rows = tensor.detach().contiguous().view(-1, tensor.shape[-1] if tensor.dim() else 1)
    size = tensor.element_size()
    integers = rows.view(torch.int64 if rows.shape[-1] * size % 8 == 0 else _INTEGERS[size])
    sums = integers.sum(-1, dtype=torch.int64)
    return (sums * (2 * torch.arange(len(sums), device=sums.device) + 1)).sum()


def _keys(slices: Iterable[object]) -> NDArray[np.int64]:
    """A number for each slice, the same on all ranks."""
    hashes = [hashlib.blake2b(repr(one).encode(), digest_size=8).digest() for one in slices]
    return np.frombuffer(b"".join(hashes), np.int64)


def _differences(names: list[str], messages: list[bytes], axis: Axis) -> list[Disagreement]:
    """Of the slices of this rank, those whose digests differ between some ranks of the axis."""
    tables = [np.frombuffer(message, np.int64).reshape(2, -1) for message in messages]
    told = [dict(zip(*table.tolist(), strict=True)) for table in tables]
    found = []
    for name, key in zip(names, tables[axis.rank][0].tolist(), strict=True):
        copies = {rank: one[key] for rank, one in zip(axis.ranks, told, strict=True) if key in one}
        (usual, count), *others = Counter(copies.values()).most_common()
        if others:
            majority = 2 * count > len(copies)
            odd = [rank for rank, value in copies.items() if majority and value != usual]
            found.append(Disagreement(name, [*copies], odd))
    return found
