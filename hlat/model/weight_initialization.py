"""Weight initialization (init_weights): initial values of any slice of any parameter.

A value depends only on the seed, the canonical parameter name and the index in the global tensor.
Every parallel layout therefore starts from the same weights, and each rank samples only its shard.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

from hlat.config.model import ModelConfig
from hlat.model.decoder_spec import compute_init_std
from hlat.model.parameter_spec import Initialization, ParameterSpec

RNG_BLOCK_SIZE = 65536
"""Consecutive elements, in row-major order, that one random stream fills."""

CHUNK_SIZE = 64 * RNG_BLOCK_SIZE
"""Elements sampled at once: limits memory to 16 MiB and resampled elements to 1 in 64."""


def compute_initial_values(
    parameter: ParameterSpec,
    model: ModelConfig,
    seed: int,
    offset: tuple[int, ...],
    shape: tuple[int, ...],
) -> NDArray[np.float32]:
    """Return the initial values of the slice of a parameter at an offset, float32."""
    if parameter.init is not Initialization.normal:
        return np.full(shape, parameter.init is Initialization.ones, np.float32)
    values = _sample_matrix(seed, parameter.name, parameter.shape[1], offset, shape)
    values *= np.float32(compute_init_std(parameter, model))
    return values


def sample_noise(
    parameter: ParameterSpec, seed: int, offset: tuple[int, ...], shape: tuple[int, ...]
) -> NDArray[np.float32]:
    """Return standard normals for the slice of a matrix at an offset.

    They are independent of the initial values of the parameter.
    """
    return _sample_matrix(seed, f"{parameter.name} noise", parameter.shape[1], offset, shape)


def _sample_matrix(
    seed: int, name: str, width: int, offset: tuple[int, ...], shape: tuple[int, ...]
) -> NDArray[np.float32]:
    """Return standard normals for the slice of a matrix of `width` columns."""
    (first_row, first_column), (num_rows, num_columns) = offset, shape
    step = max(1, CHUNK_SIZE // width)
    values = np.empty(shape, np.float32)
    for row in range(0, num_rows, step):
        count = min(step, num_rows - row)
        normals = _sample_normals(seed, name, (first_row + row) * width, count * width)
        values[row : row + count] = normals.reshape(count, width)[:, first_column:][:, :num_columns]
    return values


def _sample_normals(seed: int, name: str, start: int, count: int) -> NDArray[np.float32]:
    """Return standard normals for the flat elements start ... start + count - 1 of a parameter."""
    values = np.empty(count, np.float32)
    filled = 0
    while filled < count:
        block, skipped = divmod(start + filled, RNG_BLOCK_SIZE)
        num_values = min(RNG_BLOCK_SIZE - skipped, count - filled)
        normals = _build_generator(seed, name, block).standard_normal(
            skipped + num_values, dtype=np.float32
        )
        values[filled : filled + num_values] = normals[skipped:]
        filled += num_values
    return values


def _build_generator(seed: int, name: str, block: int) -> np.random.Generator:
    key = hashlib.blake2b(f"{seed} {name} {block}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
