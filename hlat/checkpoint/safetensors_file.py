"""Streaming writer and slice reader of safetensors files.

The safetensors library writes only from a complete copy of the file in memory. This writer streams
tensor by tensor, which limits the extra memory of a save to its largest tensor.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hlat.checkpoint.checkpoint_errors import CorruptCheckpointError, raise_as_corrupt
from hlat.checkpoint.checkpoint_manifest import SliceRecord, TensorRecord, format_slice_key
from hlat.checkpoint.remote_safetensors import RemoteSafetensors
from hlat.checkpoint.tensor_slice import TensorSlice
from hlat.storage.remote_path import RemotePath
from hlat.storage.storage_path import StoragePath

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
    """Context manager that reads tensor slices from the safetensors files of one directory."""

    def __init__(self, directory: StoragePath) -> None:
        self._directory = directory
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> "SafetensorsReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, name: str, record: TensorRecord, tensor_slice: TensorSlice) -> torch.Tensor:
        """Assemble a slice of a tensor from the saved slices that overlap it, in the saved dtype.

        Raises:
            CorruptCheckpointError: If the files contradict the record.
        """
        tensor = torch.empty(tensor_slice.size, dtype=DTYPES_BY_NAME[record.dtype])
        num_read = 0
        for slice_record in record.slices:
            overlap = tensor_slice.intersect(slice_record.tensor_slice)
            if overlap is not None:
                part = self._read_slice(name, record, slice_record, overlap)
                tensor[overlap.index_in(tensor_slice)] = part
                num_read += overlap.numel
        if num_read != tensor_slice.numel:
            raise CorruptCheckpointError(
                f"{self._directory} contains {num_read} of the {tensor_slice.numel} elements of "
                f"{name} at {tensor_slice}"
            )
        return tensor

    def _read_slice(
        self, name: str, record: TensorRecord, slice_record: SliceRecord, tensor_slice: TensorSlice
    ) -> torch.Tensor:
        saved_slice, path = slice_record.tensor_slice, self._directory / slice_record.file
        key = format_slice_key(name, record.shape, saved_slice)
        with raise_as_corrupt(path, SafetensorError):
            if slice_record.file not in self._files:
                self._files[slice_record.file] = self._stack.enter_context(_open_safetensors(path))
            file = self._files[slice_record.file]
            if tensor_slice == saved_slice:
                tensor: torch.Tensor = file.get_tensor(key)
            else:
                tensor = file.get_slice(key)[tensor_slice.index_in(saved_slice)]
        dtype = SAFETENSORS_DTYPES.get(tensor.dtype)
        if tuple(tensor.shape) != tensor_slice.size or dtype != record.dtype:
            raise CorruptCheckpointError(
                f"{path} contains {key} as {tuple(tensor.shape)} {tensor.dtype}, "
                f"manifest.json as {tensor_slice.size} {record.dtype}"
            )
        return tensor


def _open_safetensors(path: StoragePath) -> Any:
    if isinstance(path, RemotePath):
        return RemoteSafetensors(path, DTYPES_BY_NAME)
    return safe_open(path, framework="pt")
