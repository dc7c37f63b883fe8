"""Initial values of any slice of any parameter, without the rest of it.

A value depends only on the seed, the canonical name of its parameter and its index in the whole
tensor. So every layout starts from the same weights, each rank draws no more than its own shard
needs, and a difference between two layouts is never the initialisation's.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

from hlat.config.model import Model
from hlat.model.canonical import Parameter, initial_std

BLOCK = 65536
"""Consecutive elements, in row-major order, that one random stream fills."""

_CHUNK = 64 * BLOCK
"""Elements drawn at a time: bounds memory at 16 MiB, and what is drawn twice at 1 in 64."""


def initial_values(
    parameter: Parameter, model: Model, seed: int, offset: tuple[int, ...], size: tuple[int, ...]
) -> NDArray[np.float32]:
    """Initial values of one slice.

    Args:
        parameter: The parameter that is cut.
        model: Shape and initialisation of the model.
        seed: Seed of the run.
        offset: Where the slice begins, per dimension.
        size: Extent of the slice, per dimension.

    Returns:
        The slice, float32, of shape `size`.
    """
    std = initial_std(parameter, model)
    if std is None:
        return np.ones(size, np.float32)
    (first_row, first_column), (rows, columns) = offset, size
    width = parameter.shape[1]
    step = max(1, _CHUNK // width)
    values = np.empty(size, np.float32)
    for row in range(0, rows, step):
        count = min(step, rows - row)
        drawn = _normals(seed, parameter.name, (first_row + row) * width, count * width)
        values[row : row + count] = drawn.reshape(count, width)[:, first_column:][:, :columns]
    values *= np.float32(std)
    return values


def _normals(seed: int, name: str, start: int, count: int) -> NDArray[np.float32]:
    """Standard normals of the flat elements start ... start + count - 1 of the parameter `name`."""
    values = np.empty(count, np.float32)
    filled = 0
    while filled < count:
        block, skipped = divmod(start + filled, BLOCK)
        taken = min(BLOCK - skipped, count - filled)
        drawn = _stream(seed, name, block).standard_normal(skipped + taken, dtype=np.float32)
        values[filled : filled + taken] = drawn[skipped:]
        filled += taken
    return values


def _stream(seed: int, name: str, block: int) -> np.random.Generator:
    """The random stream of one block, keyed by everything that its values may depend on."""
    key = hashlib.blake2b(f"{seed} {name} {block}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
