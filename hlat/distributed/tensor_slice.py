"""Arithmetic of tensor slices, whose intersections make checkpoints independent of the layout."""

from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TensorSlice:
    """Indices offset[d] <= i[d] < offset[d] + size[d] in each dimension d."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Element count; 1 for a scalar."""
        return prod(self.size)

    def intersect(self, other: "TensorSlice") -> "TensorSlice | None":
        """Return the intersection with another slice of the same tensor; None if it is empty."""
        begin = tuple(map(max, self.offset, other.offset))
        end = map(min, self._end, other._end)
        size = tuple(last - first for first, last in zip(begin, end, strict=True))
        return TensorSlice(begin, size) if all(extent > 0 for extent in size) else None

    def index_in(self, other: "TensorSlice") -> tuple[slice, ...]:
        """Return the index of this slice in a tensor that contains `other`, its superset."""
        begins = map(int.__sub__, self.offset, other.offset)
        return tuple(
            slice(begin, begin + size) for begin, size in zip(begins, self.size, strict=True)
        )

    @property
    def _end(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(self.offset, self.size, strict=True)))


def build_full_slice(shape: tuple[int, ...]) -> TensorSlice:
    """Return the slice that covers a tensor."""
    return TensorSlice((0,) * len(shape), shape)


def is_exact_cover(
    offsets: NDArray[np.int64], sizes: NDArray[np.int64], shape: tuple[int, ...]
) -> bool:
    """Return True if n slices [n, number of dimensions] cover each element exactly once.

    The cost is that of sorting the corners of the slices. Differences along all dimensions turn the
    number of slices at each element into one signed count at each corner of each slice, and they
    are invertible. So the counts of `slices` equal those of the tensor only for an exact cover.
    """
    is_empty = (sizes == 0).any(axis=1)
    begins, ends = offsets[~is_empty], (offsets + sizes)[~is_empty]
    extents = np.array(shape, np.int64)
    if (begins < 0).any() or (sizes < 0).any() or (ends > extents).any():
        return False
    if prod(shape) == 0:
        return not len(begins)
    begins, ends = np.vstack([begins, 0 * extents]), np.vstack([ends, extents])
    strides = np.array([prod(n + 1 for n in shape[d + 1 :]) for d in range(len(shape))], np.int64)
    signs = np.ones(len(begins))
    signs[-1] = -1
    keys, counts = [], []
    for is_end in product((False, True), repeat=len(shape)):
        keys.append(np.where(is_end, ends, begins) @ strides)
        counts.append(signs * (-1) ** sum(is_end))
    _, corner = np.unique(np.concatenate(keys), return_inverse=True)
    return not np.bincount(corner, np.concatenate(counts)).any()
