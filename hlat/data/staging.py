"""Files that cannot be mapped, converted once into files that can.

Parquet, compressed Arrow and files of a store have no row that lies anywhere as plain bytes. Rather
than a second way of reading, slower and with failures of its own, they become Arrow files in the
cache folder, which any number of processes and later runs share. A conversion appears whole or not
at all; what a killed one left is removed by the next.
"""

import fcntl
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from numpy.typing import NDArray
from tqdm import tqdm

from hlat.config.errors import ConfigError
from hlat.data import remote, row_index, text_column
from hlat.data.data_file import DataFile
from hlat.data.embedded import cache_folder
from hlat.data.files import PREPARE

FORMAT = 1
"""Raised when a conversion gives other rows, so that none of another format is read."""

Place = tuple[Path, NDArray[Any]]
"""An Arrow file that can be mapped, and the index of its rows."""

_FILE = "text.arrow"
_PART = ".part"
_LOCK = ".lock"


def staged_folder() -> Path:
    """Where the conversions lie, each in a folder of its own."""
    return cache_folder() / "staged"


def _target(file: DataFile, column: str) -> Path:
    return staged_folder() / file.digest(column, FORMAT)


def find(file: DataFile, column: str) -> Place | None:
    """The Arrow file that a file was converted to, and its index, if it was."""
    path = _target(file, column) / _FILE
    index = row_index.load(row_index.sidecar(path), path, column)
    return None if index is None else (path, index)


def stage(
    files: Sequence[DataFile], column: str, key: str = text_column.KEY
) -> dict[DataFile, Place]:
    """Convert files, sharing the work with other processes that convert the same ones.

    Args:
        files: Parquet or Arrow files, here or in a store.
        column: The column that holds the documents; nothing else is kept.
        key: Config key that names the column, for messages.

    Returns:
        Where the text of each file is.

    Raises:
        ConfigError: If a file cannot be read, or the cache folder cannot take the result.
    """
    try:
        staged_folder().mkdir(parents=True, exist_ok=True)
        _sweep()
        _check_space(files)
        with _Progress(len(files)) as progress:
            # What others are at comes last, when most of it will be finished
            tried = [(file, _stage(file, column, key, progress)) for file in files]
            return {
                file: place or _await_stage(file, column, key, progress) for file, place in tried
            }
    except OSError as error:
        raise ConfigError(
            f"cannot convert files in {staged_folder()} ({error.strerror or error}); {_remedy()}"
        ) from error


def _remedy() -> str:
    return (
        f"convert it ahead of the run with `{PREPARE}`, or set the environment variable "
        "HLAT_CACHE to a folder on a larger disk"
    )


class _Progress:
    """A bar on a terminal; otherwise one line that says what takes so long."""

    def __init__(self, num_files: int) -> None:
        noun = "file" if num_files == 1 else "files"
        label = f"converting {num_files} {noun} to Arrow in {staged_folder()}"
        interactive = sys.stderr.isatty()
        if not interactive:
            print(f"{label} ...", file=sys.stderr, flush=True)
        self._bar = tqdm(desc=label, unit="B", unit_scale=True, disable=not interactive)

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, num_bytes: int) -> None:
        """Count bytes of text written."""
        self._bar.update(num_bytes)


def _sweep() -> None:
    """Remove what killed conversions left: parts whose lock nobody holds."""
    for part in staged_folder().glob(f"*{_PART}"):
        with _lock(part.with_suffix(_LOCK), wait=False) as locked:
            if locked:
                shutil.rmtree(part, ignore_errors=True)


@contextmanager
def _lock(path: Path, wait: bool) -> Iterator[bool]:
    """Hold a lock, which the system frees when its holder dies; false if it is taken.

    Its file stays: a process that waits for a removed file would hold a lock that no other sees.
    """
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def _check_space(files: Sequence[DataFile]) -> None:
    """Refuse what cannot fit; what fits only as long as it is compressed fails while writing."""
    needed = sum(file.num_bytes for file in files)
    free = shutil.disk_usage(staged_folder()).free
    if needed > free:
        raise ConfigError(
            f"{files[0].location}{f' and {len(files) - 1} more' if len(files) > 1 else ''}: "
            f"must be converted, which takes {needed / 1e9:.1f} GB or more; {staged_folder()} has "
            f"{free / 1e9:.1f} GB free; {_remedy()}"
        )


def _await_stage(file: DataFile, column: str, key: str, progress: _Progress) -> Place:
    """Convert a file unless another process does; then wait for it."""
    place = _stage(file, column, key, progress)
    if place is None:
        tqdm.write(f"waiting for the process that converts {file.location}", sys.stderr)
        place = _stage(file, column, key, progress, wait=True)
    assert place is not None
    return place


def _stage(
    file: DataFile, column: str, key: str, progress: _Progress, wait: bool = False
) -> Place | None:
    """Convert a file unless it is converted; none if another process does and we do not wait."""
    target = _target(file, column)
    with _lock(target.with_suffix(_LOCK), wait) as locked:
        if not locked:
            return None
        if place := find(file, column):
            return place
        part = target.with_suffix(_PART)
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)
        part.mkdir()
        try:
            index = _convert(file, column, key, part / _FILE, progress)
            part.rename(target)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        return target / _FILE, index


def _convert(
    file: DataFile, column: str, key: str, path: Path, progress: _Progress
) -> NDArray[Any]:
    """Write a file's text column as an Arrow file with its index, which is returned."""
    with path.open("wb") as target:
        writer = None
        for array in _read(file, column, key):
            if writer is None:
                writer = pa.ipc.new_file(target, pa.schema({column: array.type}))
            writer.write_batch(pa.RecordBatch.from_arrays([array], [column]))
            progress.add(array.nbytes)
        writer = writer or pa.ipc.new_file(target, pa.schema({column: pa.string()}))
        writer.close()
        target.flush()
        os.fsync(target.fileno())
    index = row_index.scan(path, column, key)
    row_index.save(index, path, column)
    return index


def _read(file: DataFile, column: str, key: str) -> Iterator[pa.Array]:
    """The file's text as offsets and bytes, whatever the type of its column."""
    try:
        source = remote.open_file(file.location) if file.is_remote else pa.OSFile(file.location)
        with source:
            for array in text_column.read_batches(file.location, source, column, key):
                yield array if text_column.is_plain(array.type) else array.cast(pa.large_string())
    except ConfigError:
        raise
    except Exception as error:  # every driver raises what its client library does
        if file.is_remote:
            raise remote.unreadable("cannot read", file.location, error) from error
        raise text_column.damaged(file.location, error) from error
