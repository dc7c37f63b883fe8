"""Tensors of a safetensors file that lies elsewhere, of which only what is asked for is fetched.

The library maps files of a disk. Here many processes each want their own slices of a file that may
be larger than the disk, so its header says which bytes those are, and ranges of them are read. It
stands in for the library's `safe_open`, and what it does not understand is the same error.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from safetensors import SafetensorError

from hlat.checkpoint.remote import PARALLEL_BYTES, RemotePath

_MOST_HEADER_BYTES = 100_000_000
"""As the library has it."""


class RemoteTensors:
    """The tensors of a file.

    Args:
        path: The file.
        dtypes: torch's dtypes of safetensors' names.

    Raises:
        SafetensorError: It is none.
        OSError: It cannot be read.
    """

    def __init__(self, path: RemotePath, dtypes: Mapping[str, torch.dtype]) -> None:
        self._path, self._dtypes = path, dtypes
        self._size = path.parent.sizes().get(path.name) or 0
        length = int.from_bytes(self._read(0, 8), "little")
        if length > _MOST_HEADER_BYTES:
            raise SafetensorError(f"a header of {length} bytes")
        self._begin = 8 + length
        try:
            self._header = dict(json.loads(self._read(8, self._begin)))
        except (RecursionError, TypeError, ValueError) as error:
            raise SafetensorError(f"the header is not JSON: {error}") from error

    def __enter__(self) -> "RemoteTensors":
        return self

    def __exit__(self, *_: object) -> None:
        """There is nothing to close: every request stands alone."""

    def get_tensor(self, key: str) -> torch.Tensor:
        """A whole tensor."""
        found = self.get_slice(key)
        return found[tuple(slice(0, extent) for extent in found.shape)]

    def get_slice(self, key: str) -> "RemoteTensor":
        """A tensor to cut.

        Raises:
            SafetensorError: It is not there, or its bytes cannot be what the header says.
        """
        try:
            entry = self._header[key]
            dtype, shape = self._dtypes[entry["dtype"]], tuple(map(_count, entry["shape"]))
            begin, end = map(_count, entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise SafetensorError(f"the header has no understandable {key} ({error!r})") from error
        if end - begin != prod(shape) * dtype.itemsize or self._begin + end > self._size:
            raise SafetensorError(f"{key} of shape {shape} cannot be bytes {begin} to {end}")
        return RemoteTensor(self, self._begin + begin, shape, dtype)

    def _read(self, begin: int, end: int) -> bytes:
        """Bytes of the file; it may have become shorter since it was listed."""
        if end > self._size:
            raise SafetensorError(f"the file ends at {self._size}, before byte {end}")
        found = self._path.read_range(begin, end)
        if len(found) != end - begin:
            raise SafetensorError(f"the file ends before byte {end}")
        return found


@dataclass(frozen=True)
class RemoteTensor:
    """A tensor of a file: where its first byte is, shape and dtype."""

    file: RemoteTensors
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        """Fetch a box of it, with begin and end in each dimension.

        Of each row, which is what the first dimension counts, all is fetched, and what is not in
        the box dropped: a request costs as long as a megabyte.
        """
        if not self.shape:
            return self._rows(0, 1).reshape(())
        values = torch.empty([cut.stop - cut.start for cut in index], dtype=self.dtype)
        rows, rest = index[0], index[1:]
        num_rows = max(1, PARALLEL_BYTES // max(1, self._row_bytes))
        for first in range(rows.start, rows.stop, num_rows):
            last = min(first + num_rows, rows.stop)
            block = self._rows(first, last).reshape(last - first, *self.shape[1:])
            values[first - rows.start : last - rows.start] = block[(slice(None), *rest)]
        return values

    @property
    def _row_bytes(self) -> int:
        return prod(self.shape[1:]) * self.dtype.itemsize

    def _rows(self, first: int, last: int) -> torch.Tensor:
        begin, end = (self.begin + row * self._row_bytes for row in (first, last))
        return torch.frombuffer(bytearray(self.file._read(begin, end)), dtype=self.dtype)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value
