"""Atomic creation of the directory named by output=: complete, or absent.

Files are written to a temporary sibling directory that the caller renames when it is complete.
An existing directory is never overwritten.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hlat.config.config_errors import ConfigError
from hlat.storage import durable_files
from hlat.storage.storage_path import TEMPORARY_PREFIX


def validate_output_is_new(output_dir: Path) -> None:
    """Raise ConfigError if `output_dir` exists."""
    if output_dir.exists() or output_dir.is_symlink():
        raise ConfigError(
            f"output={output_dir} exists already; specify a new directory, or remove it"
        )


@contextmanager
def create_output_directory(output_dir: Path) -> Iterator[Path]:
    """Yield a locked temporary sibling of `output_dir`, which is removed if the body raises.

    Missing parents are created. Files of a killed process in the directory are removed.

    Raises:
        ConfigError: If `output_dir` exists, or another process is writing it.
        OSError: If the directory cannot be created.
    """
    parent = output_dir.absolute().parent
    had_parent = parent.is_dir()
    durable_files.make_directory(parent)
    directory = parent / f"{TEMPORARY_PREFIX}{output_dir.name}"
    directory.mkdir(exist_ok=True)
    lock = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"output={output_dir}: another process is writing it; wait until it has finished"
            ) from error
        try:
            validate_output_is_new(output_dir)
            for leftover in directory.iterdir():
                leftover.unlink()
            yield directory
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            if not had_parent:
                with suppress(OSError):  # another process may use the parent by now
                    parent.rmdir()
            raise
    finally:
        os.close(lock)


def validate_free_space(output_dir: Path, num_bytes: int) -> None:
    """Raise ConfigError if the disk of `output_dir` has less than `num_bytes` bytes free."""
    num_free = shutil.disk_usage(output_dir.absolute().parent).free
    if num_free < num_bytes:
        raise ConfigError(
            f"output={output_dir} needs {num_bytes / 1e6:,.0f} MB, the disk has "
            f"{num_free / 1e6:,.0f} MB free"
        )
