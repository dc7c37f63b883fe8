"""Manifest of a checkpoint: its files with hashes, and the slices of its tensors, without layout.

The manifest is JSON with a SHA-256 for each file, because tensor formats do not detect flipped
bits.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath
from typing import Any

from hlat.checkpoint.checkpoint_errors import CorruptCheckpointError
from hlat.checkpoint.tensor_slice import TensorSlice, build_full_slice, has_numel_of, is_partition
from hlat.storage.durable_files import FileRecord

MANIFEST_FILE = "manifest.json"
COMMIT_MARKER = "COMMITTED"
"""File with the SHA-256 of the manifest, whose presence commits the checkpoint."""
FORMAT_VERSION = 1
DTYPE_BYTES = {
    **dict.fromkeys(("F64", "I64"), 8),
    **dict.fromkeys(("F32", "I32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL"), 1),
}
"""Bytes per element of each safetensors dtype that a checkpoint may contain."""


@dataclass(frozen=True)
class SliceRecord:
    """Slice of a tensor and the name of the file that contains it."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: str

    @property
    def tensor_slice(self) -> TensorSlice:
        """Position of the slice in the tensor."""
        return TensorSlice(self.offset, self.size)


@dataclass(frozen=True)
class TensorRecord:
    """Global shape, safetensors dtype and slices of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    slices: tuple[SliceRecord, ...]

    @classmethod
    def from_single_file(cls, shape: tuple[int, ...], dtype: str, file: str) -> "TensorRecord":
        """Return the record of a tensor that one file contains completely."""
        full = build_full_slice(shape)
        return cls(shape, dtype, (SliceRecord(full.offset, full.size, file),))


@dataclass(frozen=True)
class CheckpointManifest:
    """Files and tensors of a checkpoint by name."""

    step: int
    files: dict[str, FileRecord]
    tensors: dict[str, TensorRecord]


def format_slice_key(name: str, shape: tuple[int, ...], tensor_slice: TensorSlice) -> str:
    """Return the key of a slice in its file: the tensor name, with the offset if partial."""
    if tensor_slice.size == shape:
        return name
    return f"{name}@{','.join(map(str, tensor_slice.offset))}"


def merge_tensor_records(entries: Iterable[tuple[str, TensorRecord]]) -> dict[str, TensorRecord]:
    """Merge the slices of each tensor, given names and records with some of the slices.

    Raises:
        ValueError: If the records of a tensor differ in shape or dtype, or its slices do not cover
            it exactly once.
    """
    tensors: dict[str, TensorRecord] = {}
    for name, part in entries:
        merged = tensors.get(name, replace(part, slices=()))
        if (merged.shape, merged.dtype) != (part.shape, part.dtype):
            raise ValueError(
                f"{name} has chunks of shape {merged.shape} {merged.dtype}"
                f" and of shape {part.shape} {part.dtype}"
            )
        tensors[name] = replace(part, slices=merged.slices + part.slices)
    for name, tensor in tensors.items():
        if not is_partition([record.tensor_slice for record in tensor.slices], tensor.shape):
            raise ValueError(f"the chunks of {name} do not cover {tensor.shape} exactly once")
    return tensors


def serialize_manifest(manifest: CheckpointManifest) -> bytes:
    """Return the manifest as JSON."""
    return json.dumps({"format": FORMAT_VERSION, **asdict(manifest)}, indent=1).encode()


def parse_manifest(content: bytes) -> CheckpointManifest:
    """Parse and validate a manifest.

    Raises:
        CorruptCheckpointError: If `content` is not a valid manifest of this format version.
    """
    try:
        document = json.loads(content)
        if document["format"] != FORMAT_VERSION:
            raise CorruptCheckpointError(
                f"manifest.json has format {document['format']!r}; this version reads "
                f"{FORMAT_VERSION}"
            )
        manifest = CheckpointManifest(
            document["step"],
            {name: _parse_file_record(record) for name, record in document["files"].items()},
            {name: parse_tensor_record(record) for name, record in document["tensors"].items()},
        )
        _validate_names(manifest)
        _validate_sizes(manifest)
    except CorruptCheckpointError:
        raise
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(f"manifest.json is invalid: {error!r}") from error
    return manifest


def parse_tensor_record(record: dict[str, Any]) -> TensorRecord:
    """Return the tensor record for its JSON representation."""
    slices = tuple(
        SliceRecord(tuple(part["offset"]), tuple(part["size"]), part["file"])
        for part in record["slices"]
    )
    return TensorRecord(tuple(record["shape"]), record["dtype"], slices)


def _parse_file_record(record: dict[str, Any]) -> FileRecord:
    size, sha256 = record["size"], record["sha256"]
    if not _is_count(size) or not re.fullmatch("[0-9a-f]+", sha256):
        raise ValueError("a file record is not a size and a hash")
    return FileRecord(size, sha256)


def _validate_names(manifest: CheckpointManifest) -> None:
    for name in manifest.files:
        if PurePath(name).name != name or not name.isprintable():
            raise CorruptCheckpointError(f"manifest.json names {name!r}, outside its directory")
    for name, tensor in manifest.tensors.items():
        if not name.isprintable():
            raise CorruptCheckpointError(f"manifest.json has {name!r}, an invalid tensor name")
        for record in tensor.slices:
            if record.file not in manifest.files:
                raise CorruptCheckpointError(
                    f"manifest.json refers to {record.file!r}, which it does not list"
                )


def _validate_sizes(manifest: CheckpointManifest) -> None:
    """Raise an error if shapes or sizes exceed the files, before memory is allocated for them."""
    if not _is_count(manifest.step):
        raise CorruptCheckpointError("manifest.json has an invalid step")
    num_free = {name: record.size for name, record in manifest.files.items()}
    for name, tensor in manifest.tensors.items():
        slices = [record.tensor_slice for record in tensor.slices]
        extents = [*tensor.shape, *(n for part in slices for n in (*part.offset, *part.size))]
        if (
            tensor.dtype not in DTYPE_BYTES
            or not all(map(_is_count, extents))
            or not has_numel_of(slices, tensor.shape)
        ):
            raise CorruptCheckpointError(f"manifest.json has invalid shape or slices of {name}")
        for record, part in zip(tensor.slices, slices, strict=True):
            num_free[record.file] -= part.numel * DTYPE_BYTES[tensor.dtype]
    if overfull := [name for name, size in num_free.items() if size < 0]:
        raise CorruptCheckpointError(
            f"manifest.json assigns more bytes to {overfull[0]} than the file has"
        )


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
