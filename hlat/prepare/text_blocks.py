"""Decompressed content of a file as blocks of UTF-8, as far as it can be read.

A truncated or damaged file yields all bytes before the damage. Compression is recognized by its
magic number, since names are often wrong.
"""

import codecs
import itertools
import lzma
import re
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

BLOCK_BYTES = 1 << 20
READ_ERRORS = (
    *(pa.ArrowException, OSError, EOFError, OverflowError, lzma.LZMAError),
    UnicodeDecodeError,  # of names in damaged metadata
)
"""Exceptions of damaged files; errors of a disk or network are ConfigError (`InputReader`)."""

_MAGIC_NUMBERS = {
    "gzip": re.compile(rb"\x1f\x8b\x08"),  # RFC 1952
    "zstd": re.compile(rb"(?:\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18)"),  # RFC 8878
    "bz2": re.compile(rb"BZh[1-9]"),
    "xz": re.compile(rb"\xfd7zXZ\x00"),  # tukaani.org/xz/xz-file-format.txt
}
_READ_BYTES = 1 << 16
_RECOVERY_BYTES = (1 << 12, 1)
"""Sizes of reads of the file and of its content before damage: a read that fails returns none of
its bytes."""


def detect_codec(head: bytes) -> str | None:
    """Return the compression of a file that starts with `head`; None: not compressed."""
    matches = (codec for codec, magic in _MAGIC_NUMBERS.items() if magic.match(head))
    return next(matches, None)


class TextBlocks:
    """Iterable of the blocks of a seekable binary file from its start, in UTF-8.

    Args:
        file: Open file, which stays open.
        codec: Compression; None: not compressed.
        block_bytes: Size of a block before it is converted; None: `BLOCK_BYTES`.
    """

    def __init__(self, file: Any, codec: str | None, block_bytes: int | None = None) -> None:
        self._file, self._codec = file, codec
        self._block_bytes = block_bytes or BLOCK_BYTES
        self.encoding = "utf-8"
        """Encoding of the content, of which `utf-8` is not validated."""
        self.error: str | None = None
        """Reason why the rest cannot be read, after the last block."""
        self.num_lost_bytes = 0
        """Approximate bytes of the file, as stored, that cannot be read."""
        self._num_used = 0
        self._blocks: Iterator[bytes] = self._read_blocks()

    def peek(self, size: int) -> bytes:
        """Return `size` bytes or more from the start, or all that can be read."""
        head: list[bytes] = []
        for block in self._blocks:
            head.append(block)
            if sum(map(len, head)) >= size:
                break
        self._blocks = itertools.chain(head, self._blocks)
        return b"".join(head)

    def __iter__(self) -> Iterator[bytes]:
        """Yield the blocks once."""
        if self.encoding == "utf-8":
            yield from self._blocks
            return
        decoder = codecs.getincrementaldecoder(self.encoding)()
        try:
            for block in self._blocks:
                yield decoder.decode(block).encode()
            yield decoder.decode(b"", final=self.error is None).encode()
        except UnicodeDecodeError as error:
            yield str(error.object[: error.start], self.encoding).encode()
            self._record_error(f"is not {self.encoding}: {error.reason}")
            self.num_lost_bytes += len(error.object) - error.start

    def _read_blocks(self) -> Iterator[bytes]:
        position, reason, start = 0, "", 0
        read_bytes = (_READ_BYTES, *_RECOVERY_BYTES)
        for size, max_bytes in zip((self._block_bytes, *_RECOVERY_BYTES), read_bytes, strict=True):
            file = _LimitedFile(self._file, start, max_bytes)
            try:
                for block in self._read_from(file, position, size):
                    position += len(block)
                    self._num_used = self._file.tell()
                    yield block
                break
            except READ_ERRORS as error:
                reason = str(error).splitlines()[0]
                self._num_used = self._file.tell()
                start = self._num_used - max_bytes
        if self._codec and not self._file.tell():
            reason = f"the file is empty, which is not valid {self._codec}"
        if reason:
            self._record_error(reason)

    def _read_from(self, file: "_LimitedFile", position: int, size: int) -> Iterator[bytes]:
        """Yield blocks of `size` bytes from a position of the decompressed content."""
        self._file.seek(0)
        stream = _open_stream(file, self._codec) if self._codec else self._file
        while position:
            position -= len(stream.read(min(position, self._block_bytes)))
        while block := stream.read(size):
            yield block

    def _record_error(self, reason: str) -> None:
        self.error = reason
        self.num_lost_bytes = self._file.seek(0, 2) - self._num_used


class _LimitedFile:
    """File that pyarrow cannot close, with reads of at most `max_bytes` beyond `start`."""

    closed = False

    def __init__(self, file: Any, start: int, max_bytes: int) -> None:
        self._file, self._start, self._max_bytes = file, start, max_bytes

    def read(self, size: int) -> bytes:
        num_before = self._start - self._file.tell()
        limit = min(num_before, _READ_BYTES) if num_before > 0 else self._max_bytes
        block: bytes = self._file.read(min(size, limit))
        return block

    def close(self) -> None:
        pass


class _XzStream:
    """Content of concatenated xz streams with zeros between them.

    `lzma.LZMAFile` ignores a damaged stream after the first one.
    """

    def __init__(self, file: _LimitedFile) -> None:
        self._file, self._input = file, b""
        self._decompressor = lzma.LZMADecompressor()
        self._is_start = True

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes; none at the end."""
        while True:
            if self._decompressor.eof:
                self._input, self._is_start = self._decompressor.unused_data, True
                self._decompressor = lzma.LZMADecompressor()
            compressed = b""
            if self._decompressor.needs_input:
                compressed, self._input = self._input or self._file.read(_READ_BYTES), b""
                if not compressed:
                    if self._is_start:
                        return b""
                    raise EOFError("Truncated compressed stream")
            if self._is_start:
                compressed = compressed.lstrip(b"\0")
                self._is_start = not compressed
            if content := self._decompressor.decompress(compressed, size):
                return content


def _open_stream(file: _LimitedFile, codec: str) -> Any:
    if codec == "xz":
        return _XzStream(file)
    return pa.CompressedInputStream(pa.PythonFile(file, mode="r"), codec)
