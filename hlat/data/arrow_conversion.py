"""Conversion of Parquet, compressed Arrow and remote files to uncompressed local Arrow files.

Only uncompressed Arrow files can be memory-mapped, so other files are converted once into the cache
directory, which processes and later runs share. A conversion is moved into place when complete; the
next conversion removes what a killed process started.
"""

import fcntl
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from numpy.typing import NDArray
from tqdm import tqdm

from hlat.config.config_errors import ConfigError
from hlat.data import row_index, text_column
from hlat.data.data_cache import get_cache_dir, open_progress_bar
from hlat.data.source_files import PREPARE_COMMAND
from hlat.storage import remote_files
from hlat.storage.data_file import DataFile
from hlat.storage.storage_path import build_unusable_error

FORMAT_VERSION = 1
"""Incremented when a conversion gives other rows, which invalidates older conversions."""


class IndexedFile(NamedTuple):
    """An Arrow file that can be mapped, and its row index."""

    path: Path
    row_index: NDArray[Any]
    sidecar: Path | None = None
    """File of the index if it must be compared with the Arrow file (`row_index.find_row_index`)."""


_REMEDY = (
    f"convert it ahead of the run with `{PREPARE_COMMAND}`, or set the environment variable "
    "HLAT_CACHE to a folder on a larger disk"
)
_ARROW_FILE = "text.arrow"
_PART_SUFFIX = ".part"
_LOCK_SUFFIX = ".lock"


def get_staging_dir() -> Path:
    """Return the directory of the conversions, each in a subdirectory."""
    return get_cache_dir() / "staged"


def _get_target_dir(file: DataFile, column: str) -> Path:
    return get_staging_dir() / file.compute_cache_key(column, FORMAT_VERSION)


def find_converted_file(file: DataFile, column: str) -> IndexedFile | None:
    """Return the conversion of a file and its index, or None."""
    path = _get_target_dir(file, column) / _ARROW_FILE
    index = row_index.load_row_index(row_index.get_sidecar_path(path), path, column)
    return None if index is None else IndexedFile(path, index)


def convert_files(
    files: Sequence[DataFile], column: str, config_key: str = text_column.CONFIG_KEY
) -> dict[DataFile, IndexedFile]:
    """Convert files, sharing the work with other processes that convert the same files.

    Raises:
        ConfigError: If a file is unreadable, or the cache directory cannot store the result.
    """
    converted: dict[DataFile, IndexedFile] = {}
    waiting: list[DataFile] = []
    noun = "file" if len(files) == 1 else "files"
    label = f"converting {len(files)} {noun} to Arrow in {get_staging_dir()}"
    try:
        get_staging_dir().mkdir(parents=True, exist_ok=True)
        _remove_stale_parts()
        _validate_disk_space(files)
        with open_progress_bar(label, unit="B", unit_scale=True) as progress:
            for file in files:
                if result := _try_convert(file, column, config_key, progress):
                    converted[file] = result
                else:
                    waiting.append(file)
            # Files in conversion by other processes come last, when most of them are finished
            for file in waiting:
                tqdm.write(f"waiting for the process that converts {file.location}", sys.stderr)
                result = _try_convert(file, column, config_key, progress, wait=True)
                assert result is not None
                converted[file] = result
    except OSError as error:
        raise ConfigError(
            f"cannot convert files in {get_staging_dir()} ({error.strerror or error}); {_REMEDY}"
        ) from error
    return converted


def _remove_stale_parts() -> None:
    """Remove the unlocked parts of killed conversions."""
    for part in get_staging_dir().glob(f"*{_PART_SUFFIX}"):
        with _lock_file(part.with_suffix(_LOCK_SUFFIX), wait=False) as locked:
            if locked:
                shutil.rmtree(part, ignore_errors=True)


@contextmanager
def _lock_file(path: Path, wait: bool) -> Iterator[bool]:
    """Lock a file until exit or process end; yield False if another process has the lock.

    The lock file is never removed: a process waiting for a removed file would lock a file that
    other processes cannot see.
    """
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def _validate_disk_space(files: Sequence[DataFile]) -> None:
    """Raise ConfigError if the compressed size already exceeds the free space."""
    needed = sum(file.num_bytes for file in files)
    free = shutil.disk_usage(get_staging_dir()).free
    if needed > free:
        raise ConfigError(
            f"{files[0].location}{f' and {len(files) - 1} more' if len(files) > 1 else ''}: "
            f"must be converted, which takes {needed / 1e9:.1f} GB or more; {get_staging_dir()} "
            f"has {free / 1e9:.1f} GB free; {_REMEDY}"
        )


def _try_convert(
    file: DataFile, column: str, config_key: str, progress: "tqdm[Any]", wait: bool = False
) -> IndexedFile | None:
    """Convert a file if necessary; return None if another process does, unless waiting for it."""
    target = _get_target_dir(file, column)
    with _lock_file(target.with_suffix(_LOCK_SUFFIX), wait) as locked:
        if not locked:
            return None
        if result := find_converted_file(file, column):
            return result
        part = target.with_suffix(_PART_SUFFIX)
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)
        part.mkdir()
        try:
            index = _write_arrow_file(file, column, config_key, part / _ARROW_FILE, progress)
            part.rename(target)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        return IndexedFile(target / _ARROW_FILE, index)


def _write_arrow_file(
    file: DataFile, column: str, config_key: str, path: Path, progress: "tqdm[Any]"
) -> NDArray[Any]:
    """Write a file's text column as an Arrow file with a row index, and return the index."""
    with path.open("wb") as target:
        writer = None
        for array in _read_text_column(file, column, config_key):
            if writer is None:
                writer = pa.ipc.new_file(target, pa.schema({column: array.type}))
            writer.write_batch(pa.RecordBatch.from_arrays([array], [column]))
            progress.update(array.nbytes)
        writer = writer or pa.ipc.new_file(target, pa.schema({column: pa.string()}))
        writer.close()
        target.flush()
        os.fsync(target.fileno())
    index = row_index.build_row_index(path, column, config_key)
    row_index.save_row_index(index, path, column)
    return index


def _read_text_column(file: DataFile, column: str, config_key: str) -> Iterator[pa.Array]:
    """Yield the file's text as string or large_string arrays."""
    location = file.location
    try:
        remote = remote_files.open_file(location) if file.is_remote else None
        local = os.fsencode(location)
        with pa.OSFile(local) if remote is None else pa.PythonFile(remote, mode="r") as source:
            for array in text_column.read_text_batches(location, source, column, config_key):
                is_plain = text_column.is_plain_text_type(array.type)
                yield array if is_plain else array.cast(pa.large_string())
    except ConfigError:
        raise
    except Exception as error:  # drivers raise the errors of their client libraries
        if file.is_remote:
            raise build_unusable_error(location, error) from error
        raise text_column.build_damaged_file_error(location, error) from error
