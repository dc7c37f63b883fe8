"""Boxes of indices: the arithmetic of slices, for tensors of any number of dimensions.

Layouts differ only in how they cut a tensor into boxes, so everything that makes a checkpoint
independent of its layout is the intersection of two boxes.
"""

from dataclasses import dataclass
from itertools import combinations
from math import prod


@dataclass(frozen=True)
class Box:
    """The indices offset[d] <= i[d] < offset[d] + size[d] of each dimension d."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def count(self) -> int:
        """Elements in the box; 1 for a scalar."""
        return prod(self.size)

    def overlap(self, other: "Box") -> "Box | None":
        """The common part of two boxes of the same tensor; None if there is none."""
        begin = tuple(map(max, self.offset, other.offset))
        end = map(min, self._end, other._end)
        size = tuple(last - first for first, last in zip(begin, end, strict=True))
        return Box(begin, size) if all(extent > 0 for extent in size) else None

    def within(self, other: "Box") -> tuple[slice, ...]:
        """Index of this box in a tensor that holds just `other`, of which it is a part."""
        begins = [mine - theirs for mine, theirs in zip(self.offset, other.offset, strict=True)]
        sizes = zip(begins, self.size, strict=True)
        return tuple(slice(begin, begin + size) for begin, size in sizes)

    @property
    def _end(self) -> tuple[int, ...]:
        return tuple(begin + size for begin, size in zip(self.offset, self.size, strict=True))


def tiles(boxes: list[Box], shape: tuple[int, ...]) -> bool:
    """Whether the boxes cover a tensor of this shape, each element exactly once."""
    whole = Box((0,) * len(shape), shape)
    return (
        all(len(box.offset) == len(box.size) == len(shape) for box in boxes)
        and all(box.count == 0 or whole.overlap(box) == box for box in boxes)
        and sum(box.count for box in boxes) == whole.count
        and not any(one.overlap(other) for one, other in combinations(boxes, 2))
    )
