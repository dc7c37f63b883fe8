"""The manifest: which files a checkpoint has, and which part of which tensor lies in which file.

Everything a reader relies on is written here as plain JSON with a hash for every file, because no
tensor format notices a flipped bit by itself. It never mentions ranks or layouts: many processes
add slices to the same tensors.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
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
ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes of an element of each dtype that a checkpoint may have, as safetensors names them."""


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
        manifest = Manifest(document["step"], files, tensors)
        _check_names(manifest)
        _check_numbers(manifest)
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


def _file_record(record: dict[str, Any]) -> FileRecord:
    size, sha256 = record["size"], record["sha256"]
    if type(size) is not int or not re.fullmatch("[0-9a-f]+", sha256):
        raise ValueError("a file's record is no size and hash")
    return FileRecord(size, sha256)


def _check_numbers(manifest: Manifest) -> None:
    """Refuse sizes that no file of the checkpoint backs, before anybody makes room for them."""
    sizes = [record.size for record in manifest.files.values()]
    room = dict(zip(manifest.files, sizes, strict=True))
    if not all(map(_is_count, [manifest.step, *sizes])):
        raise CorruptCheckpointError("manifest.json has a step or size that is no count")
    for name, tensor in manifest.tensors.items():
        shape, boxes = tensor.shape, [piece.box for piece in tensor.slices]
        whole = Box((0,) * len(shape), shape)
        counts = [*shape, *(n for box in boxes for n in (*box.offset, *box.size))]
        if (
            tensor.dtype not in ITEM_BYTES
            or not all(map(_is_count, counts))
            or any(len(box.offset) != len(shape) or len(box.size) != len(shape) for box in boxes)
            or not all(box.count == 0 or whole.overlap(box) == box for box in boxes)
            or sum(box.count for box in boxes) != whole.count
        ):
            raise CorruptCheckpointError(f"manifest.json has no possible shape or slices of {name}")
        for piece in tensor.slices:
            room[piece.file] -= piece.box.count * ITEM_BYTES[tensor.dtype]
    if short := [name for name, left in room.items() if left < 0]:
        raise CorruptCheckpointError(f"manifest.json finds more in {short[0]} than it can hold")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
