"""The manifest: which files a checkpoint has, and which part of which tensor lies in which file.

Everything a reader relies on is written here as plain JSON with a hash for every file, because no
tensor format notices a flipped bit by itself. It never mentions ranks or layouts: many processes
add slices to the same tensors.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import prod
from pathlib import PurePath
from typing import Any

from hlat.checkpoint.box import Box, tiles
from hlat.checkpoint.errors import CorruptCheckpointError

NAME = "manifest.json"
"""Name of its file."""
MARKER = "COMMITTED"
"""Name of the file that holds its hash, and that makes a folder a checkpoint."""
FORMAT = 1
"""Version of the layout on disk; readers refuse any other."""


@dataclass(frozen=True)
class FileRecord:
    """What a file must be: its size in bytes and the sha256 of its bytes, in hexadecimal."""

    size: int
    sha256: str


@dataclass(frozen=True)
class SliceRecord:
    """A part of a tensor, and the name of the file that holds it."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: str

    @property
    def box(self) -> Box:
        """The part of the tensor."""
        return Box(self.offset, self.size)


@dataclass(frozen=True)
class TensorRecord:
    """A tensor of the state: global shape, dtype as safetensors names it, and all its slices."""

    shape: tuple[int, ...]
    dtype: str
    slices: tuple[SliceRecord, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything a checkpoint consists of; files and tensors by name."""

    step: int
    files: dict[str, FileRecord]
    tensors: dict[str, TensorRecord]


def slice_key(name: str, shape: tuple[int, ...], box: Box) -> str:
    """Name of a slice inside its file: the tensor's own if it is whole, else with its offset."""
    if box.size == shape:
        return name
    return f"{name}@{','.join(map(str, box.offset))}"


def collect(entries: Iterable[tuple[str, TensorRecord]]) -> dict[str, TensorRecord]:
    """Join the slices of each tensor.

    Args:
        entries: Names and records, each with the slices that one process or chunk contributes.

    Raises:
        ValueError: Two entries of a tensor disagree on its shape or dtype, or its slices do not
            cover it exactly once.
    """
    tensors: dict[str, TensorRecord] = {}
    for name, part in entries:
        known = tensors.get(name, TensorRecord(part.shape, part.dtype, ()))
        if (known.shape, known.dtype) != (part.shape, part.dtype):
            raise ValueError(
                f"{name} has chunks of shape {known.shape} {known.dtype}"
                f" and of shape {part.shape} {part.dtype}"
            )
        tensors[name] = TensorRecord(part.shape, part.dtype, known.slices + part.slices)
    for name, tensor in tensors.items():
        if not tiles([piece.box for piece in tensor.slices], tensor.shape):
            raise ValueError(f"the chunks of {name} do not cover {tensor.shape} exactly once")
    return tensors


def to_json(manifest: Manifest) -> bytes:
    """The manifest as it is written to disk."""
    return json.dumps({"format": FORMAT, **asdict(manifest)}, indent=1).encode()


def from_json(content: bytes) -> Manifest:
    """Read a manifest.

    Raises:
        CorruptCheckpointError: It is not a manifest of this format.
    """
    try:
        document = json.loads(content)
        if document["format"] != FORMAT:
            raise CorruptCheckpointError(
                f"manifest.json has format {document['format']!r}; this version reads {FORMAT}"
            )
        files = {name: _file_record(record) for name, record in document["files"].items()}
        tensors = {name: tensor_record(record) for name, record in document["tensors"].items()}
        manifest = Manifest(int(document["step"]), files, tensors)
        _check_names(manifest)
        _check_slices(manifest)
        return manifest
    except CorruptCheckpointError:
        raise
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(f"manifest.json cannot be understood: {error!r}") from error


def tensor_record(record: dict[str, Any]) -> TensorRecord:
    """Read a tensor's record from what JSON made of it."""
    slices = tuple(
        SliceRecord(tuple(piece["offset"]), tuple(piece["size"]), piece["file"])
        for piece in record["slices"]
    )
    return TensorRecord(tuple(record["shape"]), record["dtype"], slices)


def _check_names(manifest: Manifest) -> None:
    for name in manifest.files:
        if PurePath(name).name != name or not name.isprintable():
            raise CorruptCheckpointError(f"manifest.json names {name!r}, outside its folder")
    for key, tensor in manifest.tensors.items():
        if not key.isprintable():
            raise CorruptCheckpointError(f"manifest.json has {key!r}, which is no tensor's name")
        for piece in tensor.slices:
            if piece.file not in manifest.files:
                raise CorruptCheckpointError(f"manifest.json needs {piece.file!r}, not in its list")


def _check_slices(manifest: Manifest) -> None:
    """Refuse shapes that slices or files do not fill, before anybody makes room for them."""
    for name, tensor in manifest.tensors.items():
        if not _is_shape(tensor.shape) or type(tensor.dtype) is not str:
            raise CorruptCheckpointError(f"manifest.json has {name!r} of no shape or dtype")
        count = 0
        for piece in tensor.slices:
            inside = len(piece.offset) == len(piece.size) == len(tensor.shape) and all(
                begin + extent <= whole
                for begin, extent, whole in zip(piece.offset, piece.size, tensor.shape, strict=True)
            )
            known = _is_shape(piece.offset) and _is_shape(piece.size)
            if not (known and inside and piece.box.count <= manifest.files[piece.file].size):
                raise CorruptCheckpointError(f"manifest.json has a slice of {name!r} that is none")
            count += piece.box.count
        if count != prod(tensor.shape):
            raise CorruptCheckpointError(
                f"manifest.json has {name!r} with slices that do not fill {tensor.shape}"
            )


def _is_shape(extents: tuple[Any, ...]) -> bool:
    return all(type(extent) is int and extent >= 0 for extent in extents)


def _file_record(record: dict[str, Any]) -> FileRecord:
    size, sha256 = record["size"], record["sha256"]
    if type(size) is not int or not re.fullmatch("[0-9a-f]+", sha256):
        raise ValueError("a file's record is no size and hash")
    return FileRecord(size, sha256)
