"""A prepared folder: parts, and the manifest that says which, how large and with which checksums.

The manifest is written last, so that a folder without one is known to be unfinished, and it tells
what the parts were made from and what was left out, which nobody could find out afterwards.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hlat.checkpoint import durable
from hlat.config.errors import ConfigError
from hlat.data.preparation.progress import Progress
from hlat.data.preparation.shards import Part

FORMAT = 1
"""Version of manifest and parts; readers refuse any other."""
MANIFEST = "manifest.json"
WORK = ".preparing"
"""Folder of a preparation under way; hidden, so that no glob takes its parts for finished ones."""

_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True)
class InputRecord:
    """What became of one input."""

    path: str
    bytes: int
    version: str
    """Time of its last change, or whatever else its store keeps of it."""
    documents: int
    """Documents that are in the parts."""
    text_bytes: int
    empty: int
    """Documents without text, left out."""
    damaged: int
    """Documents that could not be read, left out because the user said so."""


@dataclass(frozen=True)
class IndexRecord:
    """A row index as it was written."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a prepared folder holds and what it was made from."""

    source: str
    layout: str | None
    input_column: str
    """Column or field of the inputs; the parts' own column is always `text`."""
    files: tuple[Part, ...]
    indices: tuple[IndexRecord, ...]
    inputs: tuple[InputRecord, ...]

    @property
    def records(self) -> tuple[Part | IndexRecord, ...]:
        """Every file but the manifest itself."""
        return (*self.files, *self.indices)

    @property
    def documents(self) -> int:
        """Documents in all parts."""
        return sum(one.documents for one in self.inputs)

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of all documents."""
        return sum(one.text_bytes for one in self.inputs)

    @property
    def empty(self) -> int:
        """Empty documents that were left out."""
        return sum(one.empty for one in self.inputs)

    @property
    def damaged(self) -> int:
        """Damaged documents that were left out."""
        return sum(one.damaged for one in self.inputs)


def write_json(path: Path, content: object) -> None:
    """Write a JSON file atomically and durably.

    Raises:
        OSError: If it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    durable.write(temporary, [(json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()])
    durable.rename(temporary, path)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Complete a folder that is being prepared.

    Raises:
        OSError: If it cannot be written.
    """
    totals = {
        name: getattr(manifest, name) for name in ("documents", "text_bytes", "empty", "damaged")
    }
    about = {"format": FORMAT, "column": "text", **totals, **asdict(manifest)}
    write_json(folder / WORK / MANIFEST, about)
    durable.rename(folder / WORK / MANIFEST, folder / MANIFEST)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a complete folder; None if there is none.

    Raises:
        ConfigError: If it is damaged or of another format.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != FORMAT:
            raise ConfigError(f"{path}: has format {content['format']}, not {FORMAT}")
        return _as_manifest(content)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, RecursionError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: is not a manifest of hlat.prepare ({error!r})") from error


def _as_manifest(content: dict[str, Any]) -> Manifest:
    return Manifest(
        source=content["source"],
        layout=content["layout"],
        input_column=content["input_column"],
        files=tuple(Part(**one) for one in content["files"]),
        indices=tuple(IndexRecord(**one) for one in content["indices"]),
        inputs=tuple(InputRecord(**one) for one in content["inputs"]),
    )


def find_begun(folder: Path) -> list[Path]:
    """The prepared folders at a path, finished or not: itself, or those directly in it."""
    if not folder.is_dir():
        return []
    children = sorted(child for child in folder.iterdir() if not child.name.startswith("."))
    places = (folder, *children)
    return [one for one in places if (one / MANIFEST).is_file() or (one / WORK).is_dir()]


def find_complete(folder: Path) -> dict[Path, Manifest]:
    """The prepared folders at a path, and their manifests.

    Raises:
        ConfigError: If one is damaged or not finished.
    """
    manifests = {one: read_manifest(one) for one in find_begun(folder)}
    if unfinished := [str(one) for one, manifest in manifests.items() if manifest is None]:
        raise ConfigError(
            f"{', '.join(unfinished)}: not finished; start the command again that prepares it"
        )
    return {one: manifest for one, manifest in manifests.items() if manifest is not None}


def verify(folder: Path) -> tuple[int, list[str]]:
    """Compare every file of the prepared folders at a path with its size and checksum.

    Returns:
        The bytes there should be, and one line for each file that is not as it was written.

    Raises:
        ConfigError: If there is no prepared folder, or one is not finished.
    """
    manifests = find_complete(folder)
    if not manifests:
        raise ConfigError(f"{folder}: no {MANIFEST} is there or in its folders: nothing to compare")
    records: dict[Path, Part | IndexRecord] = {
        one / record.name: record
        for one, manifest in manifests.items()
        for record in manifest.records
    }
    total = sum(one.bytes for one in records.values())
    progress = Progress(f"verifying {folder}", total)
    problems = []
    for path, record in records.items():
        if problem := _compare(path, record, progress.add):
            problems.append(f"{path}: {problem}")
    progress.close()
    problems += [
        f"{path}: is not in the manifest, but a run that reads the folder would read it"
        for one in manifests
        for path in sorted(one.glob("*.arrow"))
        if path not in records
    ]
    return total, problems


def _compare(path: Path, record: Part | IndexRecord, tick: Callable[[int], None]) -> str | None:
    """What is wrong with a file, if anything is."""
    try:
        size = path.stat().st_size
        if size != record.bytes:
            return f"has {size:,} bytes, not {record.bytes:,}"
        digest = hashlib.sha256()
        for block in _blocks(path):
            digest.update(block)
            tick(len(block))
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if digest.hexdigest() == record.sha256 else "its bytes have changed"


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            yield block
