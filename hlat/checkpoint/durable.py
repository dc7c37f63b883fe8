"""Files and folders that survive a power cut once a call has returned.

A file that is merely closed may still be lost, so each is flushed to the disk, and so is each
folder whose entries changed. What is written is hashed on the way, before a disk can change it.
A file of an object store is there, and durable, once the store has taken all of it.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hlat.checkpoint.manifest import FileRecord
from hlat.checkpoint.remote import RemotePath

_BLOCK_BYTES = 1 << 20


def write(path: Path | RemotePath, parts: Iterable["bytes | memoryview"]) -> FileRecord:
    """Write a new file, one part after the other, and flush it to the disk.

    Raises:
        OSError: It cannot be written, for example because the disk is full.
    """
    digest = hashlib.sha256()
    with _create(path) if isinstance(path, Path) else path.create() as file:
        for part in parts:
            digest.update(part)
            file.write(part)
        size = file.tell()
    return FileRecord(size, digest.hexdigest())


def measure(path: Path | RemotePath, tell: Callable[[int], None] = lambda _: None) -> FileRecord:
    """Size and hash of a file as it lies on the disk; `tell` hears of every further bytes read."""
    digest, size = hashlib.sha256(), 0
    for block in _blocks(path) if isinstance(path, Path) else path.blocks():
        digest.update(block)
        size += len(block)
        tell(len(block))
    return FileRecord(size, digest.hexdigest())


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, each flushed into its parent."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Flush the entries of a folder: files made in it, renames."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Rename within a folder, atomically, and flush it."""
    os.replace(source, target)
    sync_folder(target.parent)


@contextmanager
def _create(path: Path) -> Iterator[Any]:
    with open(path, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _blocks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            yield block
