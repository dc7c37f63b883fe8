"""A folder that a user asked for with --output: there complete, or not there at all.

It is written under another name beside its place and renamed when it is done, so that nobody ever
reads half of one, and an existing folder is never written over.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hlat.checkpoint import durable
from hlat.checkpoint.store import TEMPORARY
from hlat.config.errors import ConfigError


def refuse_existing(output: Path) -> None:
    """Return if nothing is there yet.

    Raises:
        ConfigError: Something is; it is never written over.
    """
    if output.exists() or output.is_symlink():
        raise ConfigError(f"--output {output} exists already; name a new folder, or remove it")


@contextmanager
def temporary(output: Path) -> Iterator[Path]:
    """A folder beside the output, of this process alone; removed unless it was renamed.

    Missing parents are made. What a killed process left under the name goes first.

    Raises:
        ConfigError: The output exists, or another process is writing it.
        OSError: The folder cannot be made.
    """
    parent = output.absolute().parent
    had_parent = parent.is_dir()
    durable.make_folder(parent)
    folder = output.absolute().with_name(f"{TEMPORARY}{output.name}")
    folder.mkdir(exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"--output {output}: another process is writing it; wait until it has ended"
            ) from error
        try:
            refuse_existing(output)
            for leftover in folder.iterdir():
                leftover.unlink()
            yield folder
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            if not had_parent:
                with suppress(OSError):  # another process may have begun to use it
                    parent.rmdir()
            raise
    finally:
        os.close(lock)


def refuse_full_disk(output: Path, need: int) -> None:
    """Return if `need` bytes are free where the output is to be.

    Raises:
        ConfigError: They are not.
    """
    have = shutil.disk_usage(output.absolute().parent).free
    if have < need:
        raise ConfigError(
            f"--output {output} needs {need / 1e6:,.0f} MB, the disk has {have / 1e6:,.0f} MB free"
        )
