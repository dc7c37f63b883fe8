"""Manifests of prepared directories: shards with sizes and checksums, and their inputs.

The manifest is written last, so that a directory without one is incomplete. It records the inputs
and the number of omitted documents, which the shards do not contain.
"""

import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path, PurePath
from typing import Any, TypeVar

from hlat.config.config_errors import ConfigError
from hlat.config.untrusted_files import format_value
from hlat.prepare.arrow_shards import ShardRecord
from hlat.prepare.text_losses import SkippedRecord, TextLoss
from hlat.storage import durable_files
from hlat.storage.bounded_files import load_json
from hlat.storage.progress_bar import ProgressBar

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
_SURROGATES = re.compile("[\ud800-\udfff]")
WORK_DIR = ".preparing"
"""Directory of unfinished work, hidden so that globs do not match its shards."""


@dataclass(frozen=True)
class InputRecord:
    """Record of a converted input file."""

    path: str
    bytes: int
    version: str
    """Modification time, or another value that changes with the contents."""
    documents: int
    """Documents written to shards."""
    text_bytes: int
    empty: int
    """Documents without text, omitted."""
    damaged: int
    """Documents that could not be read, omitted with skip_damaged=true."""


@dataclass(frozen=True)
class IndexRecord:
    """Record of a row index file."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class CorpusManifest:
    """Shards and inputs of a prepared directory."""

    source: str
    layout: str | None
    input_column: str
    """Column or field of the inputs; the column of the shards is always `text`."""
    files: tuple[ShardRecord, ...]
    indices: tuple[IndexRecord, ...]
    inputs: tuple[InputRecord, ...]
    skipped_files: tuple[SkippedRecord, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that determine the documents (`DocumentSettings.to_json`)."""
    removed: dict[str, int] = field(default_factory=dict)
    """Number of documents removed by each filter and as duplicates."""
    lost: tuple[TextLoss, ...] = ()
    encodings: dict[str, int] = field(default_factory=dict)
    """Number of documents converted from other encodings than UTF-8."""
    num_bytes_read: int = 0
    """Bytes of text of the inputs before filters, without lost text."""

    @property
    def records(self) -> tuple[ShardRecord | IndexRecord, ...]:
        """Records of all files except the manifest."""
        return (*self.files, *self.indices)

    @property
    def totals(self) -> dict[str, int]:
        """Documents and text_bytes of the shards; empty and damaged of the inputs."""
        return {
            "documents": sum(record.rows for record in self.files),
            "text_bytes": sum(record.text_bytes for record in self.files),
            "empty": sum(record.empty for record in self.inputs),
            "damaged": sum(record.damaged for record in self.inputs),
        }


def write_json(path: Path, content: object) -> None:
    """Write a JSON file atomically and durably."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    # File names that are not UTF-8 are surrogates, which JSON can only escape
    escaped = _SURROGATES.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    durable_files.write_file(temporary, [escaped.encode()])
    durable_files.rename_durably(temporary, path)


def write_corpus_manifest(directory: Path, manifest: CorpusManifest, work_dir: Path) -> None:
    """Complete a directory that is being prepared; `work_dir` is on the same disk."""
    content = {"format": FORMAT_VERSION, "column": "text", **manifest.totals, **asdict(manifest)}
    write_json(work_dir / MANIFEST_FILE, content)
    durable_files.rename_durably(work_dir / MANIFEST_FILE, directory / MANIFEST_FILE)


def load_work_file(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of an unfinished preparation.

    Raises:
        FileNotFoundError: If the file does not exist.
        ConfigError: If the file was not written by hlat prepare.
    """
    try:
        content = load_json(path)
        if not isinstance(content, dict):
            raise ValueError("not an object")
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: was not written by hlat prepare ({error}); delete the directory {WORK_DIR}"
        ) from error
    return content


_Record = TypeVar("_Record", InputRecord, ShardRecord, IndexRecord, SkippedRecord, TextLoss)


def parse_records(schema: type[_Record], records: Any) -> tuple[_Record, ...]:
    """Return records from a list of JSON objects.

    Raises:
        TypeError, ValueError, KeyError: If a field is missing, unknown, or has another type.
    """
    for record in records:
        for column in fields(schema):
            value = record[column.name]
            if type(value) is not column.type or (column.type is int and not 0 <= value < 2**63):
                raise ValueError(f"{column.name} is {format_value(value)}")
            if column.name == "name" and (PurePath(value).name != value or not value.isprintable()):
                raise ValueError(f"name is {format_value(value)}, not a file in the directory")
    return tuple(schema(**record) for record in records)


def parse_counts(content: Any) -> dict[str, int]:
    """Return a JSON object of counts, or raise TypeError."""
    if not isinstance(content, dict) or any(type(count) is not int for count in content.values()):
        raise TypeError(f"counts are {format_value(content)}")
    return content


def load_corpus_manifest(directory: Path) -> CorpusManifest | None:
    """Return the manifest of a directory; None if it does not exist.

    Raises:
        ConfigError: If the manifest is damaged or has another format version.
    """
    path = directory / MANIFEST_FILE
    try:
        content = load_json(path)
        if content["format"] != FORMAT_VERSION:
            raise ConfigError(f"{path}: has format {content['format']}, not {FORMAT_VERSION}")
        return CorpusManifest(
            source=content["source"],
            layout=content["layout"],
            input_column=content["input_column"],
            files=parse_records(ShardRecord, content["files"]),
            indices=parse_records(IndexRecord, content["indices"]),
            inputs=parse_records(InputRecord, content["inputs"]),
            skipped_files=parse_records(SkippedRecord, content.get("skipped_files", ())),
            settings=dict(content.get("settings", {})),
            removed=parse_counts(content.get("removed", {})),
            lost=parse_records(TextLoss, content.get("lost", ())),
            encodings=parse_counts(content.get("encodings", {})),
            num_bytes_read=int(content.get("num_bytes_read", 0)),
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: is not a manifest of hlat prepare ({error!r})") from error


def find_prepared_dirs(directory: Path) -> list[Path]:
    """Return the prepared directories, complete or not, among a directory and its children."""
    if not directory.is_dir():
        return []
    children = sorted(child for child in directory.iterdir() if not child.name.startswith("."))
    return [
        path
        for path in (directory, *children)
        if (path / MANIFEST_FILE).is_file() or (path / WORK_DIR).is_dir()
    ]


def load_complete_manifests(directory: Path) -> dict[Path, CorpusManifest]:
    """Return the manifests of a directory and its children by path.

    Raises:
        ConfigError: If a manifest is damaged, or a directory is incomplete.
    """
    manifests = {path: load_corpus_manifest(path) for path in find_prepared_dirs(directory)}
    if unfinished := [str(path) for path, manifest in manifests.items() if manifest is None]:
        raise ConfigError(
            f"{', '.join(unfinished)}: not finished; run the command that prepares it again"
        )
    return {path: manifest for path, manifest in manifests.items() if manifest is not None}


def verify_corpus(directory: Path) -> tuple[int, list[str]]:
    """Compare the files of a directory and its children with the sizes and checksums in manifests.

    Returns:
        The expected number of bytes, and one message for each file that differs.

    Raises:
        ConfigError: If no directory is prepared, or one is incomplete.
    """
    if not (manifests := load_complete_manifests(directory)):
        raise ConfigError(f"{directory}: it and its directories have no {MANIFEST_FILE} to compare")
    records: dict[Path, ShardRecord | IndexRecord] = {
        path / record.name: record
        for path, manifest in manifests.items()
        for record in manifest.records
    }
    num_bytes = sum(record.bytes for record in records.values())
    progress = ProgressBar(f"verifying {directory}", num_bytes)
    mismatches = {
        path: _find_mismatch(path, record, progress.add) for path, record in records.items()
    }
    progress.close()
    problems = [f"{path}: {problem}" for path, problem in mismatches.items() if problem]
    problems += [
        f"{path}: is not in the manifest, but a run that reads the directory would read it"
        for prepared_dir in manifests
        for path in sorted(prepared_dir.glob("*.arrow"))
        if path not in records
    ]
    return num_bytes, problems


def _find_mismatch(
    path: Path, record: ShardRecord | IndexRecord, on_progress: Callable[[int], None]
) -> str | None:
    try:
        size = path.stat().st_size
        if size != record.bytes:
            return f"has {size:,} bytes, not {record.bytes:,}"
        sha256 = durable_files.hash_file(path, on_progress).sha256
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if sha256 == record.sha256 else "its bytes have changed"
