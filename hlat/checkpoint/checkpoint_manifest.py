"""Manifest of a checkpoint: its files with hashes, and the slices of its tensors, without layout.

The manifest is JSON with a SHA-256 for each file, because tensor formats do not detect flipped
bits.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import PurePath
from typing import Any

import numpy as np

from hlat.checkpoint.checkpoint_errors import CorruptCheckpointError
from hlat.checkpoint.slice_record import SliceRecord, merge_slice_records, parse_rank_file
from hlat.distributed.tensor_slice import TensorSlice, build_full_slice, is_exact_cover
from hlat.storage.durable_files import FileRecord

MANIFEST_FILE = "manifest.json"
COMMIT_MARKER = "COMMITTED"
"""File with the SHA-256 of the manifest, whose presence commits the checkpoint."""
SIGNATURE_FILE = "COMMITTED.sig"
"""File with the signature of the content of `COMMITTED`, if the checkpoint is signed."""
FORMAT_VERSION = 2
_READABLE_VERSIONS = (1, 2)
"""In format 1, each slice has a record of its own."""
DTYPE_BYTES = {
    **dict.fromkeys(("F64", "I64"), 8),
    **dict.fromkeys(("F32", "I32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL"), 1),
}
"""Bytes per element of each safetensors dtype that a checkpoint may contain."""
_last_tensors: dict[bytes, tuple[dict[str, "TensorRecord"], dict[str, int]]] = {}
"""Tensors of the manifest that was parsed last, and their bytes in each file, by digest."""


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

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "TensorRecord":
        """Return the record for its JSON representation."""
        slices = tuple(map(SliceRecord.from_json, record["slices"]))
        return cls(tuple(record["shape"]), record["dtype"], slices)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON representation."""
        slices = [record.to_json() for record in self.slices]
        return {"shape": self.shape, "dtype": self.dtype, "slices": slices}

    def find_overlaps(self, tensor_slice: TensorSlice) -> Iterator[SliceRecord]:
        """Yield the saved slices that overlap `tensor_slice`."""
        for record in self.slices:
            yield from record.find_overlaps(tensor_slice)

    def is_complete(self) -> bool:
        """Return True if the slices cover each element exactly once."""
        if not all(len(one.offset) == len(one.size) == len(self.shape) for one in self.slices):
            return False
        empty = np.zeros((0, len(self.shape)), np.int64)
        offsets = [empty, *(record.list_offsets() for record in self.slices)]
        sizes = [empty, *(np.tile(one.size, (one.num_slices, 1)) for one in self.slices)]
        return is_exact_cover(
            np.concatenate(offsets), np.concatenate(sizes).astype(np.int64), self.shape
        )


@dataclass(frozen=True)
class CheckpointManifest:
    """Files and tensors of a checkpoint by name, or those of some ranks."""

    step: int
    files: dict[str, FileRecord]
    tensors: dict[str, TensorRecord]

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "CheckpointManifest":
        """Return the manifest for its JSON representation, without validation."""
        return cls(
            document["step"],
            {name: _parse_file_record(record) for name, record in document["files"].items()},
            {name: TensorRecord.from_json(one) for name, one in document["tensors"].items()},
        )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON representation."""
        files = {name: asdict(record) for name, record in self.files.items()}
        tensors = {name: record.to_json() for name, record in self.tensors.items()}
        return {"step": self.step, "files": files, "tensors": tensors}


def format_slice_key(name: str, shape: tuple[int, ...], tensor_slice: TensorSlice) -> str:
    """Return the key of a slice in its file: the tensor name, with the offset if partial."""
    if tensor_slice.size == shape:
        return name
    return f"{name}@{','.join(map(str, tensor_slice.offset))}"


def merge_manifests(manifests: Sequence[CheckpointManifest]) -> CheckpointManifest:
    """Merge files and slices that different ranks saved at the same step.

    Raises:
        ValueError: If the records of a tensor differ in shape or dtype.
    """
    files = {name: file for part in manifests for name, file in part.files.items()}
    records: dict[str, list[TensorRecord]] = {}
    for part in manifests:
        for name, record in part.tensors.items():
            records.setdefault(name, []).append(record)
    tensors = {
        name: same[0] if len(same) == 1 else _merge_tensor_records(name, same)
        for name, same in records.items()
    }
    return CheckpointManifest(manifests[0].step, files, tensors)


def _merge_tensor_records(name: str, records: list[TensorRecord]) -> TensorRecord:
    first = records[0]
    for record in records:
        if (first.shape, first.dtype) != (record.shape, record.dtype):
            raise ValueError(
                f"{name} has chunks of shape {first.shape} {first.dtype}"
                f" and of shape {record.shape} {record.dtype}"
            )
    slices = merge_slice_records(part for record in records for part in record.slices)
    return replace(first, slices=slices)


def merge_manifests_json(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the JSON representations of manifests."""
    return merge_manifests([*map(CheckpointManifest.from_json, documents)]).to_json()


def validate_coverage(manifest: CheckpointManifest) -> None:
    """Raise ValueError unless the slices of each tensor cover it exactly once."""
    for name, tensor in manifest.tensors.items():
        if not tensor.is_complete():
            raise ValueError(f"the chunks of {name} do not cover {tensor.shape} exactly once")


def serialize_manifest(manifest: CheckpointManifest) -> bytes:
    """Return the manifest as JSON."""
    document = {"format": FORMAT_VERSION, **manifest.to_json()}
    return json.dumps(document, separators=(",", ":")).encode()


def parse_manifest(content: bytes) -> CheckpointManifest:
    """Parse and validate a manifest.

    Raises:
        CorruptCheckpointError: If `content` is not a valid manifest of this format version.
    """
    try:
        document = json.loads(content)
        if document["format"] not in _READABLE_VERSIONS:
            versions = " and ".join(map(str, _READABLE_VERSIONS))
            raise CorruptCheckpointError(
                f"manifest.json has format {document['format']!r}; this version reads {versions}"
            )
        files = {name: _parse_file_record(record) for name, record in document["files"].items()}
        _validate_file_names(files)
        tensors, num_bytes = _parse_tensors(document["tensors"], files)
        manifest = CheckpointManifest(document["step"], files, tensors)
        _validate_sizes(manifest, num_bytes)
    except CorruptCheckpointError:
        raise
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(f"manifest.json is invalid: {error!r}") from error
    return manifest


def _parse_file_record(record: dict[str, Any]) -> FileRecord:
    size, sha256 = record["size"], record["sha256"]
    if not _is_count(size) or not re.fullmatch("[0-9a-f]+", sha256):
        raise ValueError("a file record is not a size and a hash")
    return FileRecord(size, sha256)


def _validate_file_names(files: dict[str, FileRecord]) -> None:
    for name in files:
        if PurePath(name).name != name or not name.isprintable():
            raise CorruptCheckpointError(f"manifest.json names {name!r}, outside its directory")


def _validate_tensor_names(tensors: dict[str, TensorRecord], files: dict[str, FileRecord]) -> None:
    for name, tensor in tensors.items():
        if not name.isprintable():
            raise CorruptCheckpointError(f"manifest.json has {name!r}, an invalid tensor name")
        for record in tensor.slices:
            if record.file not in files:
                raise CorruptCheckpointError(
                    f"manifest.json refers to {record.file!r}, which it does not list"
                )


def _parse_tensors(
    document: dict[str, Any], files: dict[str, FileRecord]
) -> tuple[dict[str, TensorRecord], dict[str, int]]:
    """Return the tensors of a manifest with `files`, and their bytes in each file.

    All checkpoints of a run have the same tensors, which are parsed once. An error is raised before
    memory is allocated for invalid shapes.
    """
    digest = hashlib.sha256(f"{len(files)} {document!r}".encode()).digest()
    if digest not in _last_tensors:
        tensors = {name: TensorRecord.from_json(one) for name, one in document.items()}
        _validate_tensor_names(tensors, files)
        num_bytes = _count_bytes(tensors, len(files))
        _last_tensors.clear()
        _last_tensors[digest] = (tensors, num_bytes)
    return _last_tensors[digest]


def _count_bytes(tensors: dict[str, TensorRecord], num_files: int) -> dict[str, int]:
    """Return the bytes of the tensors in each file; raise an error for invalid shapes or slices."""
    num_bytes: Counter[str] = Counter()
    for name, tensor in tensors.items():
        if (
            tensor.dtype not in DTYPE_BYTES
            or not all(map(_is_count, tensor.shape))
            or not all(_is_valid_record(one, tensor.shape, num_files) for one in tensor.slices)
            or sum(record.numel for record in tensor.slices) != prod(tensor.shape)
        ):
            raise CorruptCheckpointError(f"manifest.json has invalid shape or slices of {name}")
        for record in tensor.slices:
            for file in record.list_files():
                num_bytes[file] += prod(record.size) * DTYPE_BYTES[tensor.dtype]
    return dict(num_bytes)


def _validate_sizes(manifest: CheckpointManifest, num_bytes: dict[str, int]) -> None:
    """Raise an error if the tensors need more bytes than the files have, or the step is invalid."""
    if not _is_count(manifest.step):
        raise CorruptCheckpointError("manifest.json has an invalid step")
    for name, needed in num_bytes.items():
        if name not in manifest.files:
            raise CorruptCheckpointError(
                f"manifest.json refers to {name!r}, which it does not list"
            )
        if needed > manifest.files[name].size:
            raise CorruptCheckpointError(
                f"manifest.json assigns more bytes to {name} than the file has"
            )


def _is_valid_record(record: SliceRecord, shape: tuple[int, ...], num_files: int) -> bool:
    """Return True if the slices are parts of a tensor, in at most `num_files` files."""
    rows = [record.offset, record.size, *(axis.offset_step for axis in record.axes)]
    if not all(len(row) == len(shape) and all(map(_is_count, row)) for row in rows):
        return False
    if record.axes:
        counts = [n for axis in record.axes for n in (axis.count, axis.file_step)]
        if not all(_is_count(n) and n > 0 for n in counts) or record.num_slices > num_files:
            return False
        if parse_rank_file(record.file) is None:
            return False
    part = record.tensor_slice
    return record.numel == 0 or build_full_slice(shape).intersect(part) == part


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
