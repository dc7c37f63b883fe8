"""Views of fused weights as canonical (Hugging Face) parameters.

A fused weight interleaves the rows of several canonical parameters. Rows of one parameter that are
blocks of equal size at equal distances are one strided view, without a copy: reading and writing
use the same view. With two key/value groups of two query heads each, and one row per head:

    rows of qkv_proj: [q0 q1 k0 v0 | q2 q3 k1 v1]

    q_proj: blocks at rows 0 and 4, a view [2 blocks, 2 rows, columns] with stride 4
    k_proj: blocks at rows 2 and 6, a view [2 blocks, 1 row, columns]
    v_proj: blocks at rows 3 and 7, a view [2 blocks, 1 row, columns]
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import Tensor

from hlat.model.parameter_spec import RowRange

_Block = tuple[int, RowRange]
"""First row in the fused tensor, and the canonical rows from there."""


def iter_row_views(
    row_ranges: Iterable[RowRange], tensor: Tensor
) -> Iterator[tuple[RowRange, Tensor, int]]:
    """Yield the fewest possible views of a tensor that consists of canonical rows.

    Yields:
        Canonical rows, a view with their elements in row-major order, and the view's first row in
        the tensor.
    """
    views_by_name: dict[str, list[list[_Block]]] = {}
    start = 0
    for row_range in row_ranges:
        views = views_by_name.setdefault(row_range.name, [])
        if not views or not _continues(views[-1], start, row_range):
            views.append([])
        views[-1].append((start, row_range))
        start += row_range.num_rows
    for views in views_by_name.values():
        for blocks in views:
            start, first = blocks[0]
            merged = replace(first, num_rows=first.num_rows * len(blocks))
            yield merged, _build_view(tensor, blocks), start


def _continues(blocks: list[_Block], start: int, row_range: RowRange) -> bool:
    """Return True if rows follow those of the blocks, with the same size and distance."""
    last_start, last = blocks[-1]
    return (
        row_range.start == last.start + last.num_rows
        and row_range.num_rows == last.num_rows
        and (len(blocks) == 1 or start - last_start == last_start - blocks[-2][0])
    )


def _build_view(tensor: Tensor, blocks: list[_Block]) -> Tensor:
    """Return a view [blocks, rows of a block, ...], or [rows, ...] of a single block."""
    (start, first), (last_start, _) = blocks[0], blocks[-1]
    if len(blocks) == 1:
        return tensor.narrow(0, start, first.num_rows)
    span = tensor.narrow(0, start, last_start - start + first.num_rows)
    return span.unfold(0, first.num_rows, blocks[1][0] - start).movedim(-1, 1)
