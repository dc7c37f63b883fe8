"""Rows of text over many memory-mapped Arrow files.

A run reads documents in random order, one at a time, out of files larger than memory. A row is
therefore a slice of the mapped buffer and nothing is loaded, decoded or indexed beforehand, so that
opening costs the number of record batches and reading costs one search.
"""

import glob
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hlat.config.errors import ConfigError
from hlat.data import embedded

EMBEDDED_PREFIX = "embedded:"
NUM_SAMPLED_ROWS = 16
"""Rows whose text enters a fingerprint, besides the name, size and rows of every file."""

_FILE_MAGIC = b"ARROW1"
_STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def find_files(key: str, root: str, patterns: Iterable[str]) -> list[Path]:
    """List the files of a source, each once, in an order that only their paths decide.

    Args:
        key: Config key of the patterns, for messages.
        root: Folder that relative patterns start from.
        patterns: Files, folders of *.arrow files, globs, or `embedded:<name>`.

    Raises:
        ConfigError: If a pattern matches no file.
    """
    found: set[Path] = set()
    for pattern in patterns:
        if pattern.startswith(EMBEDDED_PREFIX):
            found.add(embedded.source_file(key, pattern.removeprefix(EMBEDDED_PREFIX)))
            continue
        path = Path(root).expanduser() / Path(pattern).expanduser()
        if path.is_dir():
            path = path / "*.arrow"
        is_file = path.is_file()
        matches = [path] if is_file else map(Path, glob.glob(str(path), recursive=True))
        files = [match for match in matches if match.is_file()]
        if not files:
            raise ConfigError(
                f"{key}: no file matches '{path}'; set data.root or the paths of this source"
            )
        found.update(files)
    if not found:
        raise ConfigError(f"{key}: is empty; list files, folders, globs or embedded:<name>")
    return sorted(found)


@dataclass(frozen=True)
class _Block:
    """The text column of one record batch, as views of the mapped file."""

    path: Path
    offsets: NDArray[Any]
    text: memoryview
    validity: memoryview | None
    shift: int
    """Bits of `validity` that come before the first row."""

    def read(self, row: int) -> str:
        if self.validity is not None:
            bit = row + self.shift
            if not self.validity[bit >> 3] >> (bit & 7) & 1:
                return ""
        start, stop = int(self.offsets[row]), int(self.offsets[row + 1])
        if not 0 <= start <= stop <= len(self.text):
            raise _damaged(self.path, "a text lies outside of the file's buffer")
        try:
            return str(self.text[start:stop], "utf-8")
        except UnicodeDecodeError as error:
            raise _damaged(self.path, f"a text is not UTF-8 ({error.reason})") from error


def _damaged(path: Path, reason: object) -> ConfigError:
    return ConfigError(
        f"{path}: not a whole Arrow IPC file ({reason}); write it again, or take it out of the "
        "paths of its source"
    )


def _describe(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema) or "no columns"


def _text_field(path: Path, schema: pa.Schema, column: str) -> int:
    """Index of the text column in a file's schema."""
    types = (pa.string(), pa.large_string())
    strings = [field.name for field in schema if field.type in types]
    remedy = "write the documents as a column of type string or large_string"
    if strings:
        remedy = f"set data.text_column to one of: {', '.join(strings)}"
    index: int = schema.get_field_index(column)
    if index < 0:
        raise ConfigError(
            f"data.text_column={column}: {path} has no column of this name; it has "
            f"{_describe(schema)}; {remedy}"
        )
    if column not in strings:
        raise ConfigError(
            f"data.text_column={column}: this column of {path} is {schema.field(index).type}, "
            f"not string or large_string; it has {_describe(schema)}; {remedy}"
        )
    return index


def _columns(path: Path, mapped: pa.Buffer, column: str) -> Iterator[pa.Array]:
    """Yield the text column of each record batch of a file in either IPC format."""
    is_file_format = mapped[: len(_FILE_MAGIC)].to_pybytes() == _FILE_MAGIC
    if not is_file_format and mapped[-len(_STREAM_END) :].to_pybytes() != _STREAM_END:
        raise _damaged(path, "it does not end as Arrow files and streams do")
    reader = pa.ipc.open_file(mapped) if is_file_format else pa.ipc.open_stream(mapped)
    index = _text_field(path, reader.schema, column)
    batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file_format else reader
    for batch in batches:
        yield batch.column(index)


def _block(path: Path, mapped: pa.Buffer, column: pa.Array) -> _Block:
    column.validate()
    validity, offsets, text = column.buffers()
    if not mapped.address <= offsets.address < mapped.address + mapped.size:
        raise ConfigError(
            f"{path}: its buffers are compressed and cannot be mapped; write it without compression"
        )
    width = np.int64 if pa.types.is_large_string(column.type) else np.int32
    first = column.offset
    return _Block(
        path=path,
        offsets=np.frombuffer(offsets, width, first + len(column) + 1)[first:],
        text=memoryview(b"" if text is None else text).cast("B"),
        validity=None if validity is None else memoryview(validity).cast("B"),
        shift=first,
    )


def _read_blocks(path: Path, column: str) -> list[_Block]:
    try:
        mapped = pa.memory_map(str(path)).read_buffer()
        return [_block(path, mapped, texts) for texts in _columns(path, mapped, column) if texts]
    except ConfigError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _damaged(path, str(error).splitlines()[0]) from error


class Corpus:
    """The documents of one source, numbered over all of its files in order."""

    def __init__(self, paths: Sequence[Path], column: str) -> None:
        """Map the files.

        Args:
            paths: Arrow IPC files, in the file or the stream format, uncompressed.
            column: The string or large_string column that holds the documents.

        Raises:
            ConfigError: If a file is missing, damaged or compressed, or has no such column.
        """
        self._paths = list(paths)
        self._column = column
        blocks_of_file = [_read_blocks(path, column) for path in paths]
        self._blocks = [block for blocks in blocks_of_file for block in blocks]
        self._rows_of_file = [sum(len(b.offsets) - 1 for b in blocks) for blocks in blocks_of_file]
        lengths = [len(block.offsets) - 1 for block in self._blocks]
        self._ends = np.cumsum(lengths, dtype=np.int64)

    def __len__(self) -> int:
        """Number of rows, empty documents included."""
        return sum(self._rows_of_file)

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of all documents."""
        return sum(int(block.offsets[-1]) - int(block.offsets[0]) for block in self._blocks)

    def text(self, row: int) -> str:
        """The document in a row; a null is an empty document.

        Raises:
            ConfigError: If the row's bytes are damaged.
        """
        assert 0 <= row < len(self)
        index = int(np.searchsorted(self._ends, row, side="right"))
        start = int(self._ends[index - 1]) if index else 0
        return self._blocks[index].read(row - start)

    def fingerprint(self) -> dict[str, Any]:
        """Files, rows and a sha256, which change when the documents or their order do."""
        digest = hashlib.sha256(f"column {self._column}\n".encode())
        for path, rows in zip(self._paths, self._rows_of_file, strict=True):
            digest.update(f"file {path.name} {path.stat().st_size} {rows}\n".encode())
        count = min(NUM_SAMPLED_ROWS, len(self))
        for row in np.linspace(0, len(self) - 1, count).astype(np.int64):
            digest.update(hashlib.sha256(self.text(int(row)).encode()).digest())
        return {"files": len(self._paths), "rows": len(self), "sha256": digest.hexdigest()}
