"""Reader of safetensors files in object stores that fetches only the requested ranges.

Implements the part of the library's `safe_open` that `SafetensorsReader` uses, with the same
exception for invalid files. The library itself maps local files only; a remote file may be larger
than the disk, and each process needs only some slices.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from safetensors import SafetensorError

from hlat.storage.remote_path import READ_BLOCK_BYTES, RemotePath

_MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors library."""


class RemoteSafetensors:
    """Tensors of a remote file; `dtypes` has the torch dtypes by their safetensors names.

    Raises:
        SafetensorError: If the file is not a safetensors file.
    """

    def __init__(self, path: RemotePath, dtypes: Mapping[str, torch.dtype]) -> None:
        self._path, self._dtypes = path, dtypes
        self._size = path.parent.list_sizes().get(path.name) or 0
        length = int.from_bytes(self._read_exactly(0, 8), "little")
        if length > _MAX_HEADER_BYTES:
            raise SafetensorError(f"the header has {length} bytes")
        self._data_offset = 8 + length
        try:
            self._header = dict(json.loads(self._read_exactly(8, self._data_offset)))
        except (RecursionError, TypeError, ValueError) as error:
            raise SafetensorError(f"the header is not JSON: {error}") from error

    def __enter__(self) -> "RemoteSafetensors":
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: requests are independent."""

    def get_tensor(self, key: str) -> torch.Tensor:
        """Return a complete tensor."""
        tensor = self.get_slice(key)
        return tensor[tuple(slice(0, extent) for extent in tensor.shape)]

    def get_slice(self, key: str) -> "RemoteTensor":
        """Return a tensor that can be indexed with slices.

        Raises:
            SafetensorError: If the key is missing or its entry in the header is invalid.
        """
        try:
            entry = self._header[key]
            dtype = self._dtypes[entry["dtype"]]
            shape = tuple(map(_validate_count, entry["shape"]))
            begin, end = map(_validate_count, entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise SafetensorError(f"the header has no valid entry {key} ({error!r})") from error
        if end - begin != prod(shape) * dtype.itemsize or self._data_offset + end > self._size:
            raise SafetensorError(f"{key} of shape {shape} cannot be bytes {begin} to {end}")
        return RemoteTensor(self, self._data_offset + begin, shape, dtype)

    def _read_exactly(self, begin: int, end: int) -> bytes:
        if end > self._size:
            raise SafetensorError(f"the file ends at {self._size}, before byte {end}")
        content = self._path.read_range(begin, end)
        if len(content) != end - begin:  # the file was truncated after it was listed
            raise SafetensorError(f"the file ends before byte {end}")
        return content


@dataclass(frozen=True)
class RemoteTensor:
    """Position of a tensor in a remote file, its shape and dtype."""

    file: RemoteSafetensors
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        """Fetch a slice with explicit start and stop in each dimension.

        Rows (the first dimension) are fetched completely and sliced afterwards: the latency of a
        request equals the transfer time of a megabyte.
        """
        if not self.shape:
            return self._read_rows(0, 1).reshape(())
        tensor = torch.empty([one.stop - one.start for one in index], dtype=self.dtype)
        rows, columns = index[0], index[1:]
        num_rows = max(1, READ_BLOCK_BYTES // max(1, self._row_bytes))
        for first in range(rows.start, rows.stop, num_rows):
            last = min(first + num_rows, rows.stop)
            block = self._read_rows(first, last).reshape(last - first, *self.shape[1:])
            tensor[first - rows.start : last - rows.start] = block[(slice(None), *columns)]
        return tensor

    @property
    def _row_bytes(self) -> int:
        return prod(self.shape[1:]) * self.dtype.itemsize

    def _read_rows(self, first: int, last: int) -> torch.Tensor:
        begin, end = (self.offset + row * self._row_bytes for row in (first, last))
        return torch.frombuffer(bytearray(self.file._read_exactly(begin, end)), dtype=self.dtype)


def _validate_count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value
