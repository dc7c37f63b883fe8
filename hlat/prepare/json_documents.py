"""Documents in JSON: lines with one object each, arrays, and objects of several lines."""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any

from hlat.prepare.text_blocks import TextBlocks

MAX_VALUES = 4_000_000
"""Limit of the lists and objects of a document, each of which takes 64 bytes of memory or more."""
_COUNTED_BYTES = 4 << 20
_SEPARATORS = re.compile(r"[\s,\ufeff]*")
_JSON_TYPES = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}

_decoder = json.JSONDecoder()


def parse_line(line: bytes, column: str) -> bytes | str:
    """Return the text of a JSON line in UTF-8, or as a string the reason why it is invalid.

    Raises:
        UnicodeDecodeError: If the line is not UTF-8.
    """
    if len(line) > _COUNTED_BYTES and line.count(b"[") + line.count(b"{") > MAX_VALUES:
        return f"has more than {MAX_VALUES:,} lists and objects"
    text = str(line, "utf-8")
    try:
        row = _decoder.decode(text)
    except (ValueError, RecursionError) as error:
        return f"is not JSON ({error})"
    return extract_text(row, column)


def extract_text(row: Any, column: str) -> bytes | str:
    """Return the text of a JSON object in UTF-8, or as a string the reason why it has none.

    `a.b` is the field `b` of an object `a`, unless a field has this name. A list of strings is a
    document of several lines.
    """
    if not isinstance(row, dict):
        return f"is {_format_json_type(row)}, not an object"
    text: Any = row
    for name in [column] if column in row else column.split("."):
        if not isinstance(text, dict) or name not in text:
            fields = ", ".join(row) or "none"
            return f"has no field '{column}' (set text_column= to one of: {fields})"
        text = text[name]
    if isinstance(text, list) and all(isinstance(line, str) for line in text):
        text = "\n".join(text)
    if text is None:
        return b""
    if not isinstance(text, str):
        return f"has {_format_json_type(text)} in '{column}', not a string"
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        return f"has half of a surrogate pair ({text[error.start]!r} at character {error.start})"


def _format_json_type(value: object) -> str:
    return "null" if value is None else _JSON_TYPES.get(type(value), "a number")


class JsonValues:
    """Iterable of the values of a JSON array, or of values one after another, in bounded memory.

    Args:
        blocks: Content in UTF-8.
        max_chars: Limit of a value.
    """

    def __init__(self, blocks: TextBlocks, max_chars: int) -> None:
        self._blocks, self._max_chars = iter(blocks), max_chars
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._buffer, self._position = "", 0
        self.error: str | None = None
        """Reason why the rest cannot be parsed, after the last value."""
        self.num_lost_bytes = 0
        """Bytes of the content after the last value."""

    def __iter__(self) -> Iterator[Any]:
        """Yield the values."""
        try:
            is_array = self._next_character() == "["
            self._position += is_array
            while (character := self._next_character()) and not (is_array and character == "]"):
                yield self._parse_value()
            if is_array and character != "]":
                raise ValueError("the array has no end")
            self._position += is_array
            if is_array and self._next_character():
                raise ValueError("there is text after the array")
        except (ValueError, RecursionError) as error:
            self.error = f"is not JSON ({error})"
            rest = len(self._buffer[self._position :].encode("utf-8", "replace"))
            self.num_lost_bytes += rest + sum(map(len, self._blocks))

    def _next_character(self) -> str:
        """Move to the next character that is no separator, and return it; empty at the end."""
        while True:
            match = _SEPARATORS.match(self._buffer, self._position)
            assert match is not None
            self._position = match.end()
            if self._position < len(self._buffer) or not self._read_block():
                return self._buffer[self._position : self._position + 1]

    def _parse_value(self) -> Any:
        while True:
            try:
                value, self._position = _decoder.raw_decode(self._buffer, self._position)
            except ValueError:
                size = len(self._buffer) - self._position
                if size > self._max_chars:
                    raise ValueError(
                        f"a document has more than {self._max_chars:,} bytes"
                    ) from None
                if size > _COUNTED_BYTES and self._count_values() > MAX_VALUES:
                    raise ValueError(f"one has more than {MAX_VALUES:,} lists") from None
                if not self._read_chars(size):
                    raise
            else:
                return value

    def _count_values(self) -> int:
        counts = (self._buffer.count(bracket, self._position) for bracket in "[{")
        return sum(counts)

    def _read_chars(self, num_chars: int) -> bool:
        """Read `num_chars` characters or more if there are as many; return False at the end."""
        before = len(self._buffer) - self._position
        while len(self._buffer) - self._position < before + num_chars and self._read_block():
            pass
        return len(self._buffer) - self._position > before

    def _read_block(self) -> bool:
        """Append a block to the buffer; return False at the end."""
        block = next(self._blocks, None)
        if block is None:
            return False
        self.num_lost_bytes = len(block)
        self._buffer = self._buffer[self._position :] + self._decode(block)
        self._position = self.num_lost_bytes = 0
        return True
