"""Files and folders that survive a power cut once a call has returned.

A file that is merely closed may still be lost, so each is flushed to the disk, and so is each
folder whose entries changed. What is written is hashed on the way, before a disk can change it.
"""

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from hlat.checkpoint.manifest import FileRecord

_BLOCK_BYTES = 1 << 20


def write(path: Path, parts: Iterable["bytes | memoryview"]) -> FileRecord:
    """Write a new file, one part after the other, and flush it to the disk.

    Raises:
        OSError: It cannot be written, for example because the disk is full.
    """
    digest = hashlib.sha256()
    with open(path, "xb") as file:
        for part in parts:
            digest.update(part)
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
        return FileRecord(file.tell(), digest.hexdigest())


def measure(path: Path, tell: Callable[[int], None] = lambda _: None) -> FileRecord:
    """Size and hash of a file as it lies on the disk; `tell` hears of every further bytes read."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            tell(len(block))
        return FileRecord(file.tell(), digest.hexdigest())


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
