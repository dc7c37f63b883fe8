"""Checkpoint roots of runs, and creation, renaming and removal of checkpoint directories.

On a local disk a checkpoint is written to a temporary directory and renamed. Object stores have no
rename: files are written under their final names, the commit marker last. A remote directory
without the marker is an incomplete checkpoint, which is ignored by readers and removed by the next
save or prune.
"""

import os
import shutil
from pathlib import Path

from hlat.checkpoint.checkpoint_manifest import COMMIT_MARKER
from hlat.storage import durable_files
from hlat.storage.remote_path import RemotePath
from hlat.storage.storage_path import TEMPORARY_PREFIX, StoragePath, parse_storage_path

DESTINATION_FILE = "checkpoints_are_in.txt"
"""File in a run directory that contains the location of its checkpoints if they are elsewhere."""

_MARKER_BYTES = 64
_STEP_PREFIX = "step_"


def build_checkpoint_root(run_dir: Path, destination: str | None) -> StoragePath:
    """Return the directory that contains a run's checkpoint directories.

    Raises:
        ConfigError: If `destination`, the value of checkpoint.destination, cannot be opened.
    """
    if destination is None:
        return run_dir
    return parse_storage_path(destination, "checkpoint.destination") / run_dir.name


def load_checkpoint_root(run_dir: StoragePath) -> StoragePath:
    """Return the checkpoint root recorded in a run directory, by default the run directory.

    Raises:
        ConfigError: If the recorded URL cannot be opened.
        OSError: If the record cannot be read.
    """
    if not isinstance(run_dir, Path) or not (run_dir / DESTINATION_FILE).is_file():
        return run_dir
    path = run_dir / DESTINATION_FILE
    return parse_storage_path(path.read_text().strip(), str(path))


def save_checkpoint_root(run_dir: Path, checkpoint_root: StoragePath) -> None:
    """Record the checkpoint root in the run directory."""
    path = run_dir / DESTINATION_FILE
    if checkpoint_root == run_dir:
        path.unlink(missing_ok=True)
        return
    location = checkpoint_root.absolute() if isinstance(checkpoint_root, Path) else checkpoint_root
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}")
    temporary.write_text(f"{location}\n")
    temporary.replace(path)


def list_step_dirs(checkpoints_dir: StoragePath) -> list[StoragePath]:
    """Return the directories named after a step, without incomplete checkpoints.

    Raises:
        OSError: If the directory cannot be listed.
    """
    if isinstance(checkpoints_dir, Path):
        return list(checkpoints_dir.glob(f"{_STEP_PREFIX}*"))
    return [path for path in _list_remote_step_dirs(checkpoints_dir) if has_checkpoint(path)]


def list_incomplete_dirs(checkpoints_dir: StoragePath) -> list[StoragePath]:
    """Return the remains of interrupted writes; call this only while no save is running."""
    if isinstance(checkpoints_dir, Path):
        return [*sorted(checkpoints_dir.glob(f"{TEMPORARY_PREFIX}*"))]
    return [path for path in _list_remote_step_dirs(checkpoints_dir) if not has_checkpoint(path)]


def has_checkpoint(path: StoragePath) -> bool:
    """Return True if a committed checkpoint, valid or damaged, has this path.

    A truncated marker does not count: some file systems write files in parts.
    """
    if isinstance(path, Path):
        return path.exists()
    sizes = path.list_sizes()
    size = sizes.get(COMMIT_MARKER)
    return COMMIT_MARKER in sizes and (size is None or size >= _MARKER_BYTES)


def create_checkpoint_dir(target: StoragePath) -> StoragePath:
    """Create and return the directory to write before `publish_checkpoint` makes it `target`."""
    if isinstance(target, RemotePath):
        target.remove()
        return target
    durable_files.make_directory(target.parent)
    temporary = target.with_name(f"{TEMPORARY_PREFIX}{target.name}-{os.getpid()}")
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir()
    return temporary


def publish_checkpoint(checkpoint_dir: StoragePath, name: str) -> None:
    """Rename a completely written directory; a remote one is published by its marker."""
    if isinstance(checkpoint_dir, Path):
        durable_files.fsync_directory(checkpoint_dir)
        durable_files.rename_durably(checkpoint_dir, checkpoint_dir.with_name(name))


def remove_checkpoint(path: StoragePath) -> None:
    """Remove a checkpoint or an incomplete directory.

    The checkpoint is invalidated first: a local directory is renamed, a remote one loses its
    marker.

    Raises:
        OSError: If it cannot be removed.
    """
    if isinstance(path, RemotePath):
        (path / COMMIT_MARKER).unlink()
        path.remove()
        return
    if not path.name.startswith(TEMPORARY_PREFIX):
        temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}")
        durable_files.rename_durably(path, temporary)
        path = temporary
    shutil.rmtree(path)


def rename_checkpoint(path: StoragePath, name: str) -> None:
    """Rename a checkpoint within its directory; a remote one is copied and removed."""
    if isinstance(path, Path):
        durable_files.rename_durably(path, path.with_name(name))
        return
    files = [file for file, size in path.list_sizes().items() if size is not None]
    for file in sorted(files, key=lambda file: file == COMMIT_MARKER):
        (path / file).copy_to(path.with_name(name) / file)
    remove_checkpoint(path)


def _list_remote_step_dirs(checkpoints_dir: RemotePath) -> list[StoragePath]:
    return [
        checkpoints_dir / name
        for name in checkpoints_dir.list_sizes()
        if name.startswith(_STEP_PREFIX)
    ]
