"""Streaming writer and slice reader of safetensors files, local and in object stores.

The safetensors library writes only from a complete copy of the file in memory. This writer streams
tensor by tensor, which limits the extra memory of a save to its largest tensor.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hlat.checkpoint.checkpoint_errors import CorruptCheckpointError, raise_as_corrupt
from hlat.checkpoint.checkpoint_manifest import TensorRecord, format_slice_key
from hlat.checkpoint.slice_record import SliceRecord
from hlat.distributed.tensor_slice import TensorSlice
from hlat.storage.remote_path import READ_BLOCK_BYTES, RemotePath
from hlat.storage.storage_path import StoragePath

_MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors library."""
SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""safetensors names of torch dtypes."""

DTYPES_BY_NAME = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
"""torch dtypes by their safetensors names."""


@dataclass(frozen=True)
class LazyTensor:
    """Tensor that is computed in blocks, in row-major order, while it is written."""

    dtype: torch.dtype
    blocks: Callable[[], Iterator[torch.Tensor]]


def serialize_tensors(
    tensors: Mapping[str, tuple[tuple[int, ...], torch.Tensor | LazyTensor]],
    metadata: dict[str, str] | None = None,
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file in order, fetching one tensor at a time.

    Args:
        tensors: By key, the shape to write and a tensor with as many elements, of any strides.
        metadata: Metadata of the file.
    """
    keys = sorted(tensors, key=lambda key: (-tensors[key][1].dtype.itemsize, key))  # alignment
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for key in keys:
        shape, tensor = tensors[key]
        begin, end = end, end + prod(shape) * tensor.dtype.itemsize
        dtype = SAFETENSORS_DTYPES[tensor.dtype]
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    header_bytes = json.dumps(header).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    yield len(header_bytes).to_bytes(8, "little") + header_bytes
    for key in keys:
        tensor = tensors[key][1]
        yield from map(to_bytes, tensor.blocks() if isinstance(tensor, LazyTensor) else [tensor])


def to_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the elements of a tensor in row-major order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


class SafetensorsReader:
    """Context manager that reads slices of the tensors in `records` from files of a directory.

    `keys` are the names of tensors in the files, if they differ from those in `records`.
    """

    def __init__(
        self,
        directory: StoragePath,
        records: Mapping[str, TensorRecord],
        keys: Mapping[str, str] | None = None,
    ) -> None:
        self._directory, self._records, self._keys = directory, records, keys or {}
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> "SafetensorsReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def get_dtype(self, name: str) -> str:
        """Return the safetensors dtype of a saved tensor."""
        return self._records[name].dtype

    def has_tensor(self, name: str) -> bool:
        """Return True if a tensor is saved."""
        return name in self._records

    def read(self, name: str, tensor_slice: TensorSlice) -> torch.Tensor:
        """Assemble a slice of a tensor from the saved slices that overlap it, in the saved dtype.

        Raises:
            CorruptCheckpointError: If the files contradict the record.
        """
        record = self._records[name]
        tensor = torch.empty(tensor_slice.size, dtype=DTYPES_BY_NAME[record.dtype])
        num_read = 0
        for slice_record in record.find_overlaps(tensor_slice):
            overlap = tensor_slice.intersect(slice_record.tensor_slice)
            assert overlap is not None
            part = self._read_slice(name, record, slice_record, overlap)
            tensor[overlap.index_in(tensor_slice)] = part
            num_read += overlap.numel
        if num_read != tensor_slice.numel:
            raise CorruptCheckpointError(
                f"{self._directory} contains {num_read} of the {tensor_slice.numel} elements of "
                f"{name} at {tensor_slice}"
            )
        return tensor

    def validate_header(self, file_name: str) -> None:
        """Raise CorruptCheckpointError if a file lacks a slice that the records assign to it.

        Names, shapes and dtypes are compared without reading values.
        """
        path = self._directory / file_name
        for name, record in self._records.items():
            for parts in record.slices:
                for part in parts.find_in_file(file_name):
                    key = format_slice_key(
                        self._keys.get(name, name), record.shape, part.tensor_slice
                    )
                    with raise_as_corrupt(path, SafetensorError):
                        file = self._get_file(path)
                        if isinstance(file, _RemoteSafetensors):
                            shape, dtype = file.describe(key)
                        else:
                            entry = file.get_slice(key)
                            shape, dtype = tuple(entry.get_shape()), entry.get_dtype()
                    self._validate_slice(path, key, (shape, dtype), (part.size, record.dtype))

    def _validate_slice(
        self,
        path: StoragePath,
        key: str,
        found: tuple[tuple[int, ...], str | None],
        expected: tuple[tuple[int, ...], str],
    ) -> None:
        """Raise CorruptCheckpointError if shape or dtype of a slice differ from its record."""
        if found != expected:
            raise CorruptCheckpointError(
                f"{path} contains {key} as {found[0]} {found[1]}, "
                f"manifest.json as {expected[0]} {expected[1]}"
            )

    def _get_file(self, path: StoragePath) -> Any:
        if path.name not in self._files:
            self._files[path.name] = self._open(path)
        return self._files[path.name]

    def _read_slice(
        self, name: str, record: TensorRecord, slice_record: SliceRecord, tensor_slice: TensorSlice
    ) -> torch.Tensor:
        saved_slice, path = slice_record.tensor_slice, self._directory / slice_record.file
        key = format_slice_key(self._keys.get(name, name), record.shape, saved_slice)
        with raise_as_corrupt(path, SafetensorError):
            file = self._get_file(path)
            index = tensor_slice.index_in(saved_slice)
            if isinstance(file, _RemoteSafetensors):
                tensor: torch.Tensor = file.read(key, index)
            elif tensor_slice == saved_slice:
                tensor = file.get_tensor(key)
            else:
                tensor = file.get_slice(key)[index]
        found = tuple(tensor.shape), SAFETENSORS_DTYPES.get(tensor.dtype)
        self._validate_slice(path, key, found, (tensor_slice.size, record.dtype))
        return tensor

    def _open(self, path: StoragePath) -> Any:
        if isinstance(path, Path):
            return self._stack.enter_context(safe_open(path, framework="pt"))
        return _RemoteSafetensors(path)


class _RemoteSafetensors:
    """Reader of a file in an object store that fetches only the requested ranges.

    The safetensors library maps local files only. A remote file may be larger than the disk, and
    each process needs only some slices.

    Raises:
        SafetensorError: If the file is not a safetensors file.
    """

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self._size = path.parent.list_sizes().get(path.name) or 0
        length = int.from_bytes(self._read_exactly(0, 8), "little")
        if length > _MAX_HEADER_BYTES:
            raise SafetensorError(f"the header has {length} bytes")
        self._data_offset = 8 + length
        try:
            self._header = dict(json.loads(self._read_exactly(8, self._data_offset)))
        except (RecursionError, TypeError, ValueError) as error:
            raise SafetensorError(f"the header is not JSON: {error}") from error

    def read(self, key: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Fetch a slice of a tensor with explicit start and stop in each dimension.

        Rows (the first dimension) are fetched completely and sliced afterwards: the latency of a
        request equals the transfer time of a megabyte.

        Raises:
            SafetensorError: If the key is missing or its entry in the header is invalid.
        """
        begin, shape, dtype = self._locate(key)
        row_bytes, sizes = prod(shape[1:]) * dtype.itemsize, [one.stop - one.start for one in index]
        rows, *columns = index or (slice(0, 1),)  # a scalar is one row
        selection = (slice(None), *columns)
        tensor = torch.empty(sizes or [1], dtype=dtype)
        num_rows = max(1, READ_BLOCK_BYTES // max(1, row_bytes))
        for first in range(rows.start, rows.stop, num_rows):
            last = min(first + num_rows, rows.stop)
            content = self._read_exactly(begin + first * row_bytes, begin + last * row_bytes)
            block = torch.frombuffer(bytearray(content), dtype=dtype)
            block = block.reshape(last - first, *shape[1:])
            tensor[first - rows.start : last - rows.start] = block[selection]
        return tensor.reshape(sizes)

    def describe(self, key: str) -> tuple[tuple[int, ...], str]:
        """Return the shape and the safetensors dtype of a tensor; raises as `read`."""
        _, shape, dtype = self._locate(key)
        return shape, SAFETENSORS_DTYPES[dtype]

    def _locate(self, key: str) -> tuple[int, tuple[int, ...], torch.dtype]:
        """Return the position of a tensor in the file, its shape and dtype."""
        try:
            entry = self._header[key]
            dtype = DTYPES_BY_NAME[entry["dtype"]]
            shape = tuple(map(_validate_count, entry["shape"]))
            begin, end = map(_validate_count, entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise SafetensorError(f"the header has no valid entry {key} ({error!r})") from error
        if end - begin != prod(shape) * dtype.itemsize or self._data_offset + end > self._size:
            raise SafetensorError(f"{key} of shape {shape} cannot be bytes {begin} to {end}")
        return self._data_offset + begin, shape, dtype

    def _read_exactly(self, begin: int, end: int) -> bytes:
        # The file may be truncated after it was listed
        content = self._path.read_range(begin, end) if end <= self._size else b""
        if len(content) != end - begin:
            raise SafetensorError(f"the file ends before byte {end}")
        return content


def _validate_count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value
