"""Tensor files: safetensors, written tensor by tensor and read slice by slice.

The library writes a file only from a complete copy of it in memory. The format is simple enough to
stream, which bounds the extra memory of a save by its largest tensor and lets the hash be taken of
what was meant, not of what the disk kept. Reading is the library's own, where there is a disk.
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

from hlat.checkpoint.box import Box
from hlat.checkpoint.errors import CorruptCheckpointError
from hlat.checkpoint.manifest import SliceRecord, TensorRecord, slice_key
from hlat.checkpoint.remote import RemotePath, UnansweredError
from hlat.checkpoint.remote_tensors import RemoteTensors
from hlat.config.precision import Dtype

DTYPES = {
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
"""Names that safetensors gives to torch's dtypes."""

RECIPE_DTYPES = {Dtype.fp32: torch.float32, Dtype.bf16: torch.bfloat16}
"""torch's dtypes of a recipe's."""

TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
"""torch's dtypes of safetensors' names."""


@dataclass(frozen=True)
class Computed:
    """A tensor that is nowhere as a whole: its blocks, in row-major order, are made when due."""

    dtype: torch.dtype
    blocks: Callable[[], Iterator[torch.Tensor]]


def parts(
    tensors: Mapping[str, tuple[tuple[int, ...], torch.Tensor | Computed]],
    metadata: dict[str, str] | None = None,
) -> Iterator[bytes | memoryview]:
    """Bytes of a safetensors file, in order; each tensor is fetched from its device when due.

    Args:
        tensors: By key: the shape to write, and values with as many elements, of any strides, or
            what computes them.
        metadata: What the file says of itself.
    """
    by_alignment = sorted(tensors, key=lambda key: (-tensors[key][1].dtype.itemsize, key))
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for key in by_alignment:
        shape, values = tensors[key]
        begin, end = end, end + prod(shape) * values.dtype.itemsize
        dtype = DTYPES[values.dtype]
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for key in by_alignment:
        values = tensors[key][1]
        blocks = values.blocks() if isinstance(values, Computed) else [values]
        yield from map(to_bytes, blocks)


def to_bytes(values: torch.Tensor) -> memoryview:
    """A tensor's elements in row-major order, as they are written to disk."""
    flat = values.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


class Reader:
    """Reads boxes of tensors from the files of one checkpoint, each opened once.

    Use it as a context manager.
    """

    def __init__(self, folder: Path | RemotePath) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, name: str, tensor: TensorRecord, box: Box) -> torch.Tensor:
        """Assemble a part of a tensor from all slices that overlap it.

        Args:
            name: The tensor's name.
            tensor: Its record in the manifest.
            box: The part that is wanted.

        Returns:
            A new tensor of shape `box.size` and the dtype that was saved.

        Raises:
            CorruptCheckpointError: The files do not hold what the record says.
            UnansweredError: The store in which they are does not give them.
        """
        values = torch.empty(box.size, dtype=TORCH_DTYPES[tensor.dtype])
        count = 0
        for piece in tensor.slices:
            overlap = box.overlap(piece.box)
            if overlap is not None:
                values[overlap.within(box)] = self._part(name, tensor, piece, overlap)
                count += overlap.count
        if count != box.count:
            raise CorruptCheckpointError(
                f"{self._folder} holds {count} of the {box.count} elements of {name} at {box}"
            )
        return values

    def _part(self, name: str, tensor: TensorRecord, piece: SliceRecord, part: Box) -> torch.Tensor:
        key = slice_key(name, tensor.shape, piece.box)
        try:
            file = self._open(piece.file)
            if part == piece.box:
                values: torch.Tensor = file.get_tensor(key)
            else:
                values = file.get_slice(key)[part.within(piece.box)]
        except UnansweredError:
            raise
        except (OSError, SafetensorError) as error:
            raise CorruptCheckpointError(f"{self._folder / piece.file}: {error}") from error
        if tuple(values.shape) != part.size or DTYPES.get(values.dtype) != tensor.dtype:
            raise CorruptCheckpointError(
                f"{self._folder / piece.file} holds {key} as {tuple(values.shape)} {values.dtype},"
                f" manifest.json as {part.size} {tensor.dtype}"
            )
        return values

    def _open(self, file: str) -> Any:
        if file not in self._files:
            self._files[file] = self._stack.enter_context(_opened(self._folder / file))
        return self._files[file]


def _opened(path: Path | RemotePath) -> Any:
    if isinstance(path, RemotePath):
        return RemoteTensors(path, TORCH_DTYPES)
    return safe_open(path, framework="pt")
