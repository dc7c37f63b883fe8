"""Headers and styles of the columns of a page's tables."""

import re
from collections.abc import Sequence

from hlat.tracking.text_format import UNKNOWN

_MAX_UNBROKEN = 24
"""Characters of a cell that is not broken into lines."""


def build_columns(headers: Sequence[str], first_style: str) -> list[tuple[str, str]]:
    """Return header and style of the columns of a table of numbers."""
    return [(header, "number" if i else first_style) for i, header in enumerate(headers)]


def detect_columns(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
    """Return header and style of the columns; those that contain texts are aligned to the left."""
    cells = zip(*rows, strict=True) if rows else [()] * len(headers)
    styles = [
        "number" if all(map(_is_number, column)) else "event" if _is_short(column) else ""
        for column in cells
    ]
    return [
        (header, style if i else "row name")
        for i, (header, style) in enumerate(zip(headers, styles, strict=True))
    ]


def _is_short(cells: Sequence[str]) -> bool:
    return all(len(cell) <= _MAX_UNBROKEN for cell in cells)


def _is_number(cell: str) -> bool:
    return cell == UNKNOWN or re.match(r"[+-]?\d", cell) is not None
