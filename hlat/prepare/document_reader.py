"""Reader of the documents in text, JSON, Parquet and Arrow files, as UTF-8 bytes.

Files are read in bounded memory. A damaged document is returned as `DamagedDocument` with its
location and the reason, so that the caller decides how to handle it. A truncated or damaged file
yields the documents that can be read.
"""

import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from hlat.data import text_column
from hlat.data.text_column import ColumnPart
from hlat.prepare import file_formats, json_documents
from hlat.prepare.input_files import InputReader
from hlat.prepare.json_documents import JsonValues
from hlat.prepare.text_blocks import READ_ERRORS, TextBlocks

MAX_LINE_BYTES = 64 << 20
"""Limit of a line or text file after decompression. Parsing a line needs several times its size."""
ROWS_PER_READ = 256
"""Rows of a Parquet file in memory at once."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_TOO_LONG = f"is longer than {MAX_LINE_BYTES:,} bytes"
_LONG_LINE = f"{_TOO_LONG}; store longer documents in Parquet or Arrow files"
_LONG_TEXT = f"{_TOO_LONG}; divide the text into documents with separator="
_NOT_UTF8 = "is not UTF-8; set encoding=, such as windows-1252, if it is text"


@dataclass(frozen=True)
class DamagedDocument:
    """Document, or part of a file, that cannot be read."""

    location: str
    """`line 12` or `document 2` (from 1), `row 11` (from 0), or where the file gets unreadable."""
    reason: str
    num_bytes: int = 0
    """Bytes of text; of a part that cannot be decompressed, bytes of the file."""
    num_documents: int = 1
    """Number of documents if the file states it, 0 for more of the document before, otherwise 1."""

    @property
    def category(self) -> str:
        """Reason without the details of this document."""
        return self.reason.partition(" (")[0]


Document = bytes | DamagedDocument
"""Text in UTF-8; b"" for an empty or null one."""


def parse_documents(
    file: InputReader,
    path: str,
    column: str,
    separator: str | None = None,
    encoding: str | None = None,
    encodings: Counter[str] | None = None,
) -> Iterator[Document]:
    """Yield the documents of a file in order, with one document and a few megabytes in memory.

    A line or text of more than `MAX_LINE_BYTES` is damaged.

    Args:
        file: Open file.
        path: Path or URL of the file.
        column: Field or column that contains the text; `a.b` for a field within a field.
        separator: Text between the documents of a text file; None: the file is one document.
        encoding: Encoding of text and JSON lines that are not UTF-8, UTF-16 or UTF-32; None: such
            documents are damaged.
        encodings: Counter to which the documents in other encodings than UTF-8 are added.

    Raises:
        ConfigError: If the file cannot be read, or its schema lacks a text column of this name.
    """
    detected, blocks = file_formats.open_blocks(file, path)
    decoder = _Decoder(encoding, Counter() if encodings is None else encodings)
    if detected.problem:
        yield DamagedDocument("at its start", f"is {detected.problem}", file.seek(0, 2))
        return
    if detected.name in ("parquet", "arrow"):
        yield from _parse_columns(file, blocks if detected.codec else None, path, column)
        return
    if detected.name == "lines":
        documents = _parse_lines(blocks, column, decoder)
    elif detected.name == "json":
        documents = _parse_json(blocks, column)
    else:
        documents = _parse_text(blocks, separator, decoder)
    for document in documents:
        if detected.encoding != "utf-8" and isinstance(document, bytes):
            decoder.counts[detected.encoding] += 1
        yield document


@dataclass(frozen=True)
class _Decoder:
    """Conversion to UTF-8 from the encoding of `encoding=`."""

    encoding: str | None
    counts: Counter[str]
    """Converted documents by encoding."""

    def decode(self, value: bytes, location: str) -> Document:
        try:
            str(value, "utf-8")
        except UnicodeDecodeError as error:
            if self.encoding is None:
                return _build_not_utf8(location, value, error, _NOT_UTF8)
        else:
            return value
        try:
            text = str(value, self.encoding)
        except UnicodeDecodeError as error:
            reason = f"is neither UTF-8 nor {self.encoding} ({error.reason})"
            return DamagedDocument(location, reason, len(value))
        self.counts[self.encoding] += 1
        return text.encode()


def _build_not_utf8(
    location: str, value: bytes, error: UnicodeDecodeError, category: str = "is not UTF-8"
) -> DamagedDocument:
    position = f"byte 0x{value[error.start]:02x} at position {error.start}"
    return DamagedDocument(location, f"{category} ({position})", len(value))


def _build_truncated(location: str, reason: object, num_bytes: int) -> DamagedDocument:
    text = f"the rest is truncated or damaged ({str(reason).splitlines()[0]})"
    return DamagedDocument(location, text, num_bytes)


def _split(blocks: Iterator[bytes], separator: bytes) -> Iterator[bytes | int | None]:
    """Yield the parts between separators; with an empty separator all blocks are one part.

    A part of more than `MAX_LINE_BYTES` is None, and at its end the number of its other bytes.
    """
    parts: list[bytes] = []
    num_bytes, is_too_long = 0, False
    tail = b""  # may be the beginning of a separator
    for block in blocks:
        first, *rest = (tail + block).split(separator) if separator else (block,)
        last = rest.pop() if rest else None
        end = first if last is None else last
        length = max(0, len(end) - len(separator) + 1)
        tail = end[length:]
        if last is None:
            first = first[:length]
        num_bytes += len(first)
        if num_bytes > MAX_LINE_BYTES and not is_too_long:
            yield None  # now, since its end may be terabytes away
            is_too_long = True
            parts.clear()
        if not is_too_long:
            parts.append(first)
        if last is not None:
            yield num_bytes - MAX_LINE_BYTES if is_too_long else b"".join(parts)
            yield from rest
            parts, num_bytes, is_too_long = [last[:length]], length, False
    num_bytes += len(tail)
    yield num_bytes - MAX_LINE_BYTES if is_too_long else b"".join([*parts, tail])


def _build_too_long(location: str, reason: str, num_more_bytes: int | None) -> DamagedDocument:
    if num_more_bytes is None:
        return DamagedDocument(location, reason, MAX_LINE_BYTES)
    return DamagedDocument(location, reason, num_more_bytes, num_documents=0)


def _parse_text(blocks: TextBlocks, separator: str | None, decoder: _Decoder) -> Iterator[Document]:
    """Yield a text as one document, or its parts without the newlines around separators."""
    number = 0
    for part in _split(iter(blocks), (separator or "").encode()):
        number += not isinstance(part, int)
        location = f"document {number}"
        if not isinstance(part, bytes):
            yield _build_too_long(location, _LONG_TEXT, part)
            continue
        text = part.removeprefix(_BYTE_ORDER_MARK) if number == 1 else part
        if separator is not None:
            text = text.strip(b"\r\n")
        if blocks.error:
            text = _remove_incomplete_character(text)
        yield decoder.decode(text, location) if text.strip() else b""
    if blocks.error:
        yield _build_truncated(f"after document {number}", blocks.error, blocks.num_lost_bytes)


def _remove_incomplete_character(text: bytes) -> bytes:
    """Return text without the beginning of a character at its end."""
    try:
        str(text, "utf-8")
    except UnicodeDecodeError as error:
        return text[: error.start] if error.reason == "unexpected end of data" else text
    return text


def _parse_lines(blocks: TextBlocks, column: str, decoder: _Decoder) -> Iterator[Document]:
    number, last, num_lost_bytes = 0, 0, 0
    for line in _split(iter(blocks), b"\n"):
        number += not isinstance(line, int)
        if not isinstance(line, bytes):
            yield _build_too_long(f"line {number}", _LONG_LINE, line)
        elif row := (line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line).strip():
            document = _parse_line(row, column, f"line {number}", decoder)
            if blocks.error and isinstance(document, DamagedDocument):
                num_lost_bytes = len(line)  # the line at the end of a truncated file
                break
            yield document
        elif blocks.error:
            break
        last = number
    if blocks.error:
        num_bytes = num_lost_bytes + blocks.num_lost_bytes
        yield _build_truncated(f"after line {last}", blocks.error, num_bytes)


def _parse_line(row: bytes, column: str, location: str, decoder: _Decoder) -> Document:
    try:
        text = json_documents.parse_line(row, column)
    except UnicodeDecodeError:
        decoded = decoder.decode(row, location)
        if isinstance(decoded, DamagedDocument):
            return decoded
        text = json_documents.parse_line(decoded, column)
    return _check_text(text, location, len(row))


def _check_text(text: bytes | str, location: str, num_bytes: int) -> Document:
    """Return a text, or a damaged document for a reason why there is none."""
    return text if isinstance(text, bytes) else DamagedDocument(location, text, num_bytes)


def _parse_json(blocks: TextBlocks, column: str) -> Iterator[Document]:
    """Yield the documents of an array, or of objects one after another."""
    values = JsonValues(blocks, MAX_LINE_BYTES)
    number = 0
    for number, value in enumerate(values, 1):
        text = json_documents.extract_text(value, column)
        yield _check_text(text, f"document {number}", len(str(value)))
    if blocks.error:
        num_bytes = values.num_lost_bytes + blocks.num_lost_bytes
        yield _build_truncated(f"after document {number}", blocks.error, num_bytes)
    elif values.error:
        yield DamagedDocument(f"after document {number}", values.error, values.num_lost_bytes)


def _parse_columns(
    file: InputReader, blocks: TextBlocks | None, path: str, column: str
) -> Iterator[Document]:
    """Yield the documents of a Parquet or Arrow file.

    The blocks of a compressed file are written to a temporary file first, as its readers seek.
    """
    if blocks is None:
        yield from _parse_parts(file, path, column)
        return
    with tempfile.TemporaryFile() as temporary:
        for block in blocks:
            temporary.write(block)
        if blocks.error:
            yield _build_truncated("at its start", blocks.error, file.seek(0, 2))
        else:
            yield from _parse_parts(temporary, path, column)


def _parse_parts(file: Any, path: str, column: str) -> Iterator[Document]:
    """Yield the documents of all row groups or record batches; a damaged one loses its rest."""
    end = 0
    try:
        for part in text_column.iter_column_parts(
            path, pa.PythonFile(file, mode="r"), column, "text_column", rows_per_batch=ROWS_PER_READ
        ):
            end = yield from _parse_part(part, end)
    except READ_ERRORS as error:
        location = f"after {end} rows" if end else "at its start"
        yield _build_truncated(location, error, file.seek(0, 2))


def _parse_part(part: ColumnPart, start: int) -> Generator[Document, None, int]:
    """Yield the documents of a part that starts at a row, and return the row of the next part."""
    row = start
    try:
        for array in part.arrays:
            for value in _decode_values(array):
                yield b"" if value is None else _validate_utf8(value, f"row {row}")
                row += 1
    except READ_ERRORS as error:
        num_rows = part.num_rows or 1
        num_lost = num_rows - (row - start) if part.num_rows else 1
        reason = f"a row group or record batch is damaged ({str(error).splitlines()[0]})"
        num_bytes = part.num_bytes * num_lost // num_rows
        yield DamagedDocument(f"after {row} rows", reason, num_bytes, num_lost)
        return start + num_rows
    return row


def _decode_values(array: pa.Array) -> list[bytes | None]:
    if not text_column.is_plain_text_type(array.type):
        array.validate(full=True)  # the cast follows indices and views
        array = array.cast(pa.large_string())
    binary = array.cast(pa.large_binary())  # invalid UTF-8 then affects single documents
    binary.validate(full=True)
    values: list[bytes | None] = binary.to_pylist()
    return values


def _validate_utf8(value: bytes, location: str) -> Document:
    try:
        str(value, "utf-8")
    except UnicodeDecodeError as error:
        return _build_not_utf8(location, value, error)
    return value
