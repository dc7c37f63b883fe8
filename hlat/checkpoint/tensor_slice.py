"""Arithmetic of tensor slices, whose intersections make checkpoints independent of the layout."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod


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


def has_numel_of(slices: Sequence[TensorSlice], shape: tuple[int, ...]) -> bool:
    """Return True if `slices` are parts of a tensor and have as many elements as the tensor."""
    full = build_full_slice(shape)
    return (
        all(len(part.offset) == len(part.size) == len(shape) for part in slices)
        and all(part.numel == 0 or full.intersect(part) == part for part in slices)
        and sum(part.numel for part in slices) == full.numel
    )


def is_partition(slices: Sequence[TensorSlice], shape: tuple[int, ...]) -> bool:
    """Return True if `slices` cover each element of a tensor exactly once."""
    overlaps = (first.intersect(second) for first, second in combinations(slices, 2))
    return has_numel_of(slices, shape) and not any(overlaps)
