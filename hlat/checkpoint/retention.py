"""Selection of the checkpoint to resume from, and removal of old checkpoints.

A damaged checkpoint is not resumed from and does not count towards `checkpoint.keep_last`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from hlat.checkpoint.checkpoint_directory import (
    find_unused_name,
    list_incomplete_dirs,
    list_steps,
    parse_step,
    remove_checkpoint,
    rename_checkpoint,
)
from hlat.checkpoint.checkpoint_errors import CorruptCheckpointError
from hlat.checkpoint.checkpoint_manifest import CheckpointManifest
from hlat.checkpoint.checkpoint_store import load_manifest, load_shared_manifest, verify_files
from hlat.distributed.object_group import (
    ObjectGroup,
    SingleRankGroup,
    broadcast_object,
    run_and_reduce,
    run_on_rank0,
)
from hlat.storage.storage_path import StoragePath


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """Checkpoint with contents that match its hashes, and its manifest."""

    path: StoragePath
    manifest: CheckpointManifest


def find_newest_valid(
    checkpoints_dir: StoragePath,
    before_step: int | None = None,
    verified: StoragePath | None = None,
    on_progress: Callable[[int], None] = lambda _: None,
    process_group: ObjectGroup | None = None,
) -> tuple[StoragePath | None, list[str]]:
    """Return the path and messages of `find_newest_checkpoint`."""
    newest, problems = find_newest_checkpoint(
        checkpoints_dir, before_step, verified, on_progress, process_group
    )
    return (newest.path if newest else None), problems


def find_newest_checkpoint(
    checkpoints_dir: StoragePath,
    before_step: int | None = None,
    verified: StoragePath | None = None,
    on_progress: Callable[[int], None] = lambda _: None,
    process_group: ObjectGroup | None = None,
    trusted_keys: str | None = None,
) -> tuple[VerifiedCheckpoint | None, list[str]]:
    """Find the newest committed checkpoint whose contents match its hashes.

    Returns the checkpoint or None, and one message for each newer one that is damaged.

    Args:
        checkpoints_dir: Directory of the run's checkpoints; it may not exist.
        before_step: If given, only earlier steps are considered.
        verified: Checkpoint that the caller has just written or read; only its manifest is read.
        on_progress: Called with the number of bytes of each read.
        process_group: Ranks that divide the files and all call this function; by default one.
        trusted_keys: File of public keys, with one of which the checkpoint must be signed.

    Raises:
        OSError: If the directory cannot be listed or a store does not respond.
    """
    group, problems = process_group or SingleRankGroup(), list[str]()

    def list_names() -> list[str]:
        steps = list_steps(checkpoints_dir)
        return [
            path.name for step, path in steps.items() if before_step is None or step < before_step
        ]

    for path in (checkpoints_dir / name for name in reversed(run_on_rank0(group, list_names))):
        try:
            if path == verified:
                return VerifiedCheckpoint(path, load_shared_manifest(path, group)), problems
            return verify_on_all_ranks(path, group, on_progress, trusted_keys), problems
        except CorruptCheckpointError as error:
            problems.append(f"checkpoint {path.name} is rejected: {error}")
    return None, problems


def verify_on_all_ranks(
    path: StoragePath,
    process_group: ObjectGroup,
    on_progress: Callable[[int], None] = lambda _: None,
    trusted_keys: str | None = None,
) -> VerifiedCheckpoint:
    """Verify a checkpoint with all ranks of a group, each of which reads some of the files.

    Raises:
        CorruptCheckpointError: On all ranks, if the checkpoint is damaged on any.
        OSError: On all ranks, if a store does not respond.
    """
    manifest = load_shared_manifest(path, process_group, trusted_keys)
    names = [*manifest.files][process_group.rank :: process_group.size]

    def find_problem() -> str | None:
        try:
            verify_files(path, manifest, names, on_progress)
        except CorruptCheckpointError as error:
            return str(error)
        return None

    problem = run_and_reduce(process_group, find_problem, lambda found: found[0])
    if (problem := broadcast_object(process_group, problem)) is not None:
        raise CorruptCheckpointError(problem)
    return VerifiedCheckpoint(path, manifest)


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
    steps = reversed(list_steps(checkpoints_dir).items())
    older = [
        (step, path)
        for step, path in steps
        if step < newest_step and _is_intact(path, trusted_keys)
    ]
    return list_incomplete_dirs(checkpoints_dir) + [
        path
        for step, path in older[max(keep_last - 1, 0) :]
        if keep_every_steps is None or step % keep_every_steps
    ]


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
