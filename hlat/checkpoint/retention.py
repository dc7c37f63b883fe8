"""Removal of old checkpoints, and renaming of those that runs must not resume from.

A damaged checkpoint does not count towards `checkpoint.keep_last`.
"""

from hlat.checkpoint.checkpoint_directory import (
    find_unused_name,
    list_incomplete_dirs,
    list_steps,
    parse_step,
    remove_checkpoint,
    rename_checkpoint,
)
from hlat.checkpoint.checkpoint_errors import CorruptCheckpointError
from hlat.checkpoint.checkpoint_lookup import find_newest_checkpoint
from hlat.checkpoint.checkpoint_store import load_manifest
from hlat.storage.storage_path import StoragePath


def list_prunable(
    checkpoints_dir: StoragePath,
    newest: StoragePath | None,
    keep_last: int,
    keep_every_steps: int | None = None,
    trusted_keys: str | None = None,
) -> list[StoragePath]:
    """Return the intact checkpoints to remove and the remains of interrupted writes.

    Args:
        checkpoints_dir: Directory of the run's checkpoints.
        newest: Newest valid checkpoint; only older ones are returned, none if it is None.
        keep_last: Number of intact checkpoints to retain including `newest`.
        keep_every_steps: If given, checkpoints at multiples of this step are retained.
        trusted_keys: File of public keys; checkpoints without their signatures are not intact.
    """
    newest_step = (newest and parse_step(newest)) or 0
    num_others, prunable = max(keep_last - 1, 0), list_incomplete_dirs(checkpoints_dir)
    for step, path in reversed(list_steps(checkpoints_dir).items()):
        is_periodic = keep_every_steps is not None and step % keep_every_steps == 0
        if step >= newest_step or (is_periodic and num_others == 0):
            continue  # retained, also if it is damaged
        if not _is_intact(path, trusted_keys):
            continue
        if num_others:
            num_others -= 1
        else:
            prunable.append(path)
    return prunable


def prune_checkpoints(
    checkpoints_dir: StoragePath,
    keep_last: int,
    keep_every_steps: int | None = None,
    verified: StoragePath | None = None,
    trusted_keys: str | None = None,
) -> list[StoragePath]:
    """Remove what `list_prunable` returns for the newest valid checkpoint, and return it.

    With `trusted_keys`, a checkpoint without a trusted signature is treated as damaged.

    A checkpoint is invalidated before its files are removed, so that a kill does not leave a
    partial one. Call this only while no save is running.
    """
    newest, _ = find_newest_checkpoint(
        checkpoints_dir, verified=verified, trusted_keys=trusted_keys
    )
    path = newest.path if newest else None
    paths = list_prunable(checkpoints_dir, path, keep_last, keep_every_steps, trusted_keys)
    for path in paths:
        remove_checkpoint(path)
    return paths


def remove_oldest(
    checkpoints_dir: StoragePath,
    first_bad_step: int | None,
    keep_every_steps: int | None = None,
    trusted_keys: str | None = None,
) -> str:
    """Remove the oldest checkpoint to free space, and return its name; empty if all are needed.

    The newest valid checkpoint before `first_bad_step` is retained for a rollback, as are those at
    multiples of `keep_every_steps`. Older ones are removed before newer ones.
    """
    needed, _ = find_newest_checkpoint(
        checkpoints_dir, before_step=first_bad_step, trusted_keys=trusted_keys
    )
    for step, path in list_steps(checkpoints_dir).items():
        is_kept = keep_every_steps is not None and step % keep_every_steps == 0
        if needed is not None and path != needed.path and not is_kept:
            remove_checkpoint(path)
            return path.name
    return ""


def quarantine_checkpoints(checkpoints_dir: StoragePath, after_step: int) -> None:
    """Rename the checkpoints of steps after `after_step` so that runs do not resume from them."""
    for step, path in list_steps(checkpoints_dir).items():
        if step > after_step:
            rename_checkpoint(path, find_unused_name(path, "diverged"))


def _is_intact(path: StoragePath, trusted_keys: str | None) -> bool:
    try:
        load_manifest(path, trusted_keys)
    except CorruptCheckpointError:
        return False
    return True
