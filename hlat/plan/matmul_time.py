"""Time of matmuls on one device: the longer of computation and memory traffic.

A GPU computes a matrix in tiles, one on each multiprocessor at a time, so the tiles at the end of
rows and columns and the last wave of tiles are partly idle.

Source: NVIDIA, Matrix Multiplication Background User's Guide (DU-09799-001), sections 2 and 3:
math and memory bounds, typical tiles, tile quantization, wave quantization.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

_TILES = ((256, 128), (128, 256), (128, 128))
"""Rows and columns of the most efficient tiles of cuBLAS (section 2.3 of the guide)."""
_SPLITS = (1, 2, 4)
"""Parts of the inner dimension, if it is the longest, that are summed in parallel so that a small
output has enough tiles (CUTLASS, Efficient GEMM in CUDA, parallelized reductions)."""


@dataclass(frozen=True)
class Matmul:
    """Product of [num_rows, num_inputs] and [num_inputs, num_outputs], `count` times."""

    num_rows: int
    num_inputs: int
    num_outputs: int
    count: int = 1

    @property
    def flops(self) -> float:
        """FLOPs of all products."""
        return 2.0 * self.num_rows * self.num_inputs * self.num_outputs * self.count

    @property
    def num_elements(self) -> int:
        """Elements of all operands and outputs."""
        rows, inputs, outputs = self.num_rows, self.num_inputs, self.num_outputs
        return self.count * (rows * inputs + inputs * outputs + rows * outputs)

    @property
    def num_weights(self) -> int:
        """Elements of the second operands."""
        return self.count * self.num_inputs * self.num_outputs

    @property
    def gradients(self) -> tuple["Matmul", "Matmul"]:
        """Matmuls of the gradients of rows and of weights."""
        rows, inputs, outputs = self.num_rows, self.num_inputs, self.num_outputs
        return (
            Matmul(rows, outputs, inputs, self.count),
            Matmul(outputs, rows, inputs, self.count),
        )


@dataclass(frozen=True)
class MatmulSpeed:
    """Achieved speed of matmuls.

    Attributes:
        flops: FLOP/s of large matmuls.
        memory: Bytes/s.
        itemsize: Bytes per element.
        num_multiprocessors: Tiles that are computed at a time; None: only FLOPs take time.
    """

    flops: float
    memory: float
    itemsize: int
    num_multiprocessors: int | None


def compute_matmul_time(matmul: Matmul, speed: MatmulSpeed) -> float:
    """Return the seconds of a matmul."""
    if speed.num_multiprocessors is None:
        return matmul.flops / speed.flops
    utilization = compute_tile_utilization(matmul, speed.num_multiprocessors)
    compute_s = matmul.flops / (speed.flops * utilization)
    return max(compute_s, matmul.num_elements * speed.itemsize / speed.memory)


@lru_cache(100_000)
def compute_tile_utilization(matmul: Matmul, num_multiprocessors: int) -> float:
    """Return the used fraction of the computed elements, for the best tiles."""
    utilizations = list[float]()
    is_deep = matmul.num_inputs >= max(matmul.num_rows, matmul.num_outputs)
    for (tile_rows, tile_columns), splits in product(_TILES, _SPLITS if is_deep else _SPLITS[:1]):
        num_tiles = -(-matmul.num_rows // tile_rows) * -(-matmul.num_outputs // tile_columns)
        num_waves = -(-num_tiles * matmul.count * splits // num_multiprocessors)
        num_computed = num_waves * num_multiprocessors / splits * tile_rows * tile_columns
        num_used = matmul.num_rows * matmul.num_outputs * matmul.count
        utilizations.append(num_used / num_computed)
    return max(utilizations)
