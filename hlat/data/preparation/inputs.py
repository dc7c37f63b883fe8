"""Files that hold documents, wherever they lie: found, told apart by name, and opened.

People have corpora as downloads have left them: folders among whose documents lie cards and lists,
saved data sets with caches beside the data, buckets. What is a document file is decided here, by
name alone, so that nothing is read before everything is known, and nothing is read twice.
"""

import glob
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import fsspec
from fsspec.implementations.local import LocalFileSystem

from hlat.config.errors import ConfigError

CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
KINDS = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "lines",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
READABLE = ".jsonl, .json or .ndjson (also .gz, .zst, .bz2), .parquet, .arrow"

_NO_DOCUMENTS = frozenset(
    {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "manifest.json"}
)
"""Descriptions that lie beside documents and are none."""
_VERSIONS = ("ETag", "etag", "LastModified", "last_modified", "updated", "mtime", "created")
"""What file systems call that which changes when a file does."""


@dataclass(frozen=True)
class Input:
    """A file of documents."""

    path: str
    """Absolute, or a URL."""
    bytes: int
    """As it lies there, compressed or not."""
    version: str
    """Changes when the file does: its modification time, or what its file system has instead."""


def kind(path: str) -> tuple[str, str | None] | None:
    """What a file holds (`lines`, `parquet` or `arrow`) and its codec, by its name; None: neither.

    A name that ends in a codec's suffix alone is taken for lines: peS2o's newer files have such.
    """
    *_, inner, last = "", "", *PurePosixPath(path).suffixes
    if held := KINDS.get(last.lower()):
        return held, None
    codec = CODECS.get(last.lower())
    if codec and (not inner or KINDS.get(inner.lower()) == "lines"):
        return "lines", codec
    return None


def find(patterns: Iterable[str], output: Path | None = None) -> list[Input]:
    """List the inputs that paths, folders, globs and URLs name, each once, sorted by path.

    Args:
        patterns: As typed.
        output: Folder whose files are never inputs: what is being prepared.

    Raises:
        ConfigError: With all problems: nothing there, nothing that can be read, no access, or a
            text that lies there twice.
    """
    found: dict[str, Input] = {}
    problems: list[str] = []
    for pattern in patterns:
        try:
            inputs = _match(pattern)
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        outside = {one.path: one for one in inputs if not _is_below(output, one.path)}
        if inputs and not outside:
            problems.append(f"{pattern}: lies in --output {output}; choose another folder for that")
        if not inputs:
            problems.append(f"{pattern}: no file of documents there; they end in {READABLE}")
        found.update(outside)
    problems += _twins(found)
    if problems:
        raise ConfigError(*problems)
    return sorted(found.values(), key=lambda one: one.path)


def _is_below(folder: Path | None, path: str) -> bool:
    return folder is not None and path.startswith(f"{folder.absolute()}/")


def _twins(paths: Iterable[str]) -> Iterator[str]:
    """Refuse a file that lies beside its own compressed form."""
    first: dict[str, str] = {}
    for path in sorted(paths):
        other = first.setdefault(_without_codec(path), path)
        if other != path:
            yield f"{other} and {path}: the same documents, by their names; take one of them out"


def _without_codec(path: str) -> str:
    known = kind(path)
    return path.removesuffix(PurePosixPath(path).suffix) if known and known[1] else path


def _file_system(path: str) -> tuple[Any, str]:
    try:
        system, inner = fsspec.core.url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    return system, inner


def _match(pattern: str) -> list[Input]:
    system, path = _file_system(pattern)
    try:
        return _match_in(system, path, pattern)
    except ConfigError:
        raise
    except Exception as error:  # every file system raises its own
        raise ConfigError(f"{pattern}: cannot be listed ({_reason(error)})") from error


def _match_in(system: Any, path: str, pattern: str) -> list[Input]:
    if system.exists(path):
        names = [path]
    elif glob.has_magic(path):
        folder = re.split(r"[*?[]", path, maxsplit=1)[0].rpartition("/")[0]
        names = [name for name in system.glob(path) if not _is_hidden(name, folder)]
    else:
        raise ConfigError(f"{pattern}: there is no such file or folder")
    inputs = []
    for name in names:
        if system.isdir(name):
            inputs += [_describe(system, file) for file in _walk(system, name)]
        elif kind(name):
            inputs.append(_describe(system, name))
        elif names == [path]:
            raise ConfigError(f"{pattern}: cannot tell by its name what it is; use {READABLE}")
    return inputs


def _walk(system: Any, folder: str) -> list[str]:
    """Document files below a folder: no hidden ones, no descriptions, no caches of data sets."""
    below = [name for name in system.find(folder) if not _is_hidden(name, folder)]
    folders: dict[str, set[str]] = {}
    for name in below:
        parent, _, file = name.rpartition("/")
        folders.setdefault(parent, set()).add(file)
    chosen = []
    for parent, files in folders.items():
        _refuse_splits(system, parent, files)
        if "state.json" in files and "dataset_info.json" in files:
            files = _saved_files(parent, json.loads(system.cat_file(f"{parent}/state.json")))
        chosen += [f"{parent}/{file}" for file in files if kind(file) and file not in _NO_DOCUMENTS]
    return chosen


def _is_hidden(name: str, folder: str) -> bool:
    below = name.removeprefix(folder.rstrip("/") + "/")
    return any(part.startswith(".") for part in below.split("/"))


def _refuse_splits(system: Any, folder: str, files: set[str]) -> None:
    """A saved data set of several splits: nobody wants to train on its test documents unawares."""
    if "dataset_dict.json" not in files:
        return
    splits = json.loads(system.cat_file(f"{folder}/dataset_dict.json"))["splits"]
    if len(splits) > 1:
        raise ConfigError(
            f"{folder}: is a saved data set with the splits {', '.join(splits)}; name the folder "
            f"of one, such as {folder}/{splits[0]}"
        )


def _saved_files(folder: str, state: dict[str, Any]) -> set[str]:
    """What `datasets.Dataset.save_to_disk` lists as its data; maps leave caches beside it."""
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise ConfigError(
            f"{folder}: is a selection of rows whose list lies beside them; save the data set "
            "again after flatten_indices()"
        )
    files = {str(file["filename"]) for file in state["_data_files"]}
    if outside := sorted(file for file in files if PurePosixPath(file).name != file):
        raise ConfigError(
            f"{folder}: its state.json names {outside[0]}, which is not in the folder"
        )
    return files


def _describe(system: Any, name: str) -> Input:
    if isinstance(system, LocalFileSystem):
        stat = os.stat(name)  # of what a link leads to
        return Input(os.path.abspath(name), stat.st_size, str(stat.st_mtime_ns))
    info = system.info(name)
    version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
    return Input(system.unstrip_protocol(name), int(info["size"]), version)


def _reason(error: Exception) -> str:
    named = error.strerror if isinstance(error, OSError) else None
    return named or next(iter(str(error).splitlines()), "") or type(error).__name__


class OpenInput(io.RawIOBase):
    """An input's bytes; whatever keeps them from being read is a ConfigError that names it."""

    def __init__(self, path: str, tick: Callable[[int], None] = lambda _: None) -> None:
        """Open a file for reading.

        Args:
            path: Path or URL.
            tick: Told the bytes of every read.

        Raises:
            ConfigError: If it cannot be opened.
        """
        self._path, self._tick = path, tick
        self.num_read = 0
        system, inner = _file_system(path)
        self._file: BinaryIO = self._attempt(system.open, inner, "rb")

    def _attempt(self, do: Any, *arguments: Any) -> Any:
        try:
            return do(*arguments)
        except Exception as error:  # every file system raises its own
            raise ConfigError(f"{self._path}: cannot be read ({_reason(error)})") from error

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """As every file system of fsspec is."""
        return True

    def read(self, size: int | None = -1) -> bytes:
        """Read at most `size` bytes; all that are left without one."""
        block: bytes = self._attempt(self._file.read, -1 if size is None else size)
        self.num_read += len(block)
        self._tick(len(block))
        return block

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to a byte position, and return it."""
        position: int = self._attempt(self._file.seek, offset, whence)
        return position

    def tell(self) -> int:
        """The byte position."""
        return self._file.tell()

    def close(self) -> None:
        """Close it; more than once does no harm."""
        if not self.closed:
            self._file.close()
        super().close()
