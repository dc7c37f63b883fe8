"""Durable file operations: when a call returns, its result survives a power failure.

Files and modified directories are flushed with fsync. Contents are hashed while they are written,
before a disk can alter them. An object in an object store is durable once its upload completes.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hlat.storage.remote_path import RemotePath

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and hexadecimal SHA-256 of a file."""

    size: int
    sha256: str


def write_file(path: Path | RemotePath, blocks: Iterable["bytes | memoryview"]) -> FileRecord:
    """Write `blocks` to a new file and flush it to disk.

    Raises:
        OSError: If the file cannot be written, for example because the disk is full.
    """
    digest, size = hashlib.sha256(), 0

    def hash_blocks() -> Iterator["bytes | memoryview"]:
        nonlocal size
        for block in blocks:
            digest.update(block)
            size += len(block)
            yield block

    if isinstance(path, RemotePath):
        path.write_blocks(hash_blocks())
    else:
        with open(path, "xb") as file:
            file.writelines(hash_blocks())
            file.flush()
            os.fsync(file.fileno())
    return FileRecord(size, digest.hexdigest())


def hash_file(
    path: Path | RemotePath, on_progress: Callable[[int], None] = lambda _: None
) -> FileRecord:
    """Return size and SHA-256 of a stored file; call `on_progress` with the bytes of each read."""
    digest, size = hashlib.sha256(), 0
    for block in path.iter_blocks() if isinstance(path, RemotePath) else read_blocks(path):
        digest.update(block)
        size += len(block)
        on_progress(len(block))
    return FileRecord(size, digest.hexdigest())


def read_blocks(path: Path) -> Iterator[bytes]:
    """Yield the contents of a local file in blocks of 1 MiB."""
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            yield block


def make_directory(path: Path) -> None:
    """Create a directory and its missing parents, and flush each parent."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Flush the entries of a directory: files created in it and renames."""
    fsync_file(path)


def fsync_file(path: Path) -> None:
    """Flush the content of a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename_durably(source: Path, target: Path) -> None:
    """Rename within a directory atomically, replacing `target`, and flush the directory."""
    os.replace(source, target)
    fsync_directory(target.parent)


def replace_file(path: Path | RemotePath, content: bytes, durable: bool = False) -> None:
    """Write a file atomically: readers see the old or the new content.

    With `durable`, so does a reader after a power failure. An object is always durable.
    """
    if isinstance(path, RemotePath):
        path.write_blocks([content])
        return
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # it may be a symbolic link
    temporary.write_bytes(content)
    if durable:
        fsync_file(temporary)
    temporary.replace(path)
    if durable:
        fsync_directory(path.parent)
