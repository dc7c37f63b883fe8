"""Selection of the checkpoint to resume from, and removal of old checkpoints.

A damaged checkpoint is not resumed from and does not count towards `checkpoint.keep_last`.
"""

from collections.abc import Callable

from hlat.checkpoint.checkpoint_directory import (
    find_unused_name,
    list_incomplete_dirs,
    list_steps,
    parse_step,
    remove_checkpoint,
    rename_checkpoint,
)
from hlat.checkpoint.checkpoint_errors import CorruptCheckpointError
from hlat.checkpoint.checkpoint_store import load_manifest, verify_checkpoint
from hlat.parallelism.process_group import (
    ProcessGroup,
    SingleProcessGroup,
    broadcast_object,
    run_on_all,
)
from hlat.storage.storage_path import StoragePath


def find_newest_valid(
    checkpoints_dir: StoragePath,
    before_step: int | None = None,
    verified: StoragePath | None = None,
    on_progress: Callable[[int], None] = lambda _: None,
    process_group: ProcessGroup | None = None,
    rank: int = 0,
) -> tuple[StoragePath | None, list[str]]:
    """Find the newest committed checkpoint whose contents match its hashes.

    Returns the checkpoint or None, and one message for each newer one that is damaged.

    Args:
        checkpoints_dir: Directory of the run's checkpoints; it may not exist.
        before_step: If given, only earlier steps are considered.
        verified: Checkpoint that the caller has just written or read; it is not read again.
        on_progress: Called with the number of bytes of each read.
        process_group: Ranks that divide the files and all call this function; by default one.
        rank: Rank of this process in the group.

    Raises:
        OSError: If the directory cannot be listed or a store does not respond.
    """
    group, problems = process_group or SingleProcessGroup(), list[str]()

    def list_names() -> list[str]:
        steps = list_steps(checkpoints_dir) if group.is_rank0 else {}
        return [
            path.name for step, path in steps.items() if before_step is None or step < before_step
        ]

    names = broadcast_object(group, run_on_all(group, list_names)[:1])[0]
    for path in (checkpoints_dir / name for name in reversed(names)):
        problem = None
        if path != verified:
            problem = find_problem_on_all_ranks(path, group, rank, on_progress)
        if problem is None:
            return path, problems
        problems.append(f"checkpoint {path.name} is rejected: {problem}")
    return None, problems


def find_problem_on_all_ranks(
    path: StoragePath,
    process_group: ProcessGroup,
    rank: int = 0,
    on_progress: Callable[[int], None] = lambda _: None,
) -> str | None:
    """Verify a checkpoint with all ranks of a group, each of which reads some of the files.

    Returns the first problem, the same on all ranks; None if the checkpoint is valid.

    Raises:
        OSError: On all ranks, if a store does not respond.
    """
    num_ranks = broadcast_object(process_group, len(process_group.gather_object(None)))

    def find_problem() -> str | None:
        try:
            verify_checkpoint(path, on_progress, rank, num_ranks)
        except CorruptCheckpointError as error:
            return str(error)
        return None

    results = run_on_all(process_group, find_problem)
    problem: str | None = broadcast_object(process_group, next(filter(None, results), None))
    return problem


def list_prunable(
    checkpoints_dir: StoragePath,
    newest: StoragePath | None,
    keep_last: int,
    keep_every_steps: int | None = None,
) -> list[StoragePath]:
    """Return the intact checkpoints to remove and the remains of interrupted writes.

    Args:
        checkpoints_dir: Directory of the run's checkpoints.
        newest: Newest valid checkpoint; only older ones are returned, none if it is None.
        keep_last: Number of intact checkpoints to retain including `newest`.
        keep_every_steps: If given, checkpoints at multiples of this step are retained.
    """
    newest_step = (newest and parse_step(newest)) or 0
    steps = reversed(list_steps(checkpoints_dir).items())
    older = [(step, path) for step, path in steps if step < newest_step and _is_intact(path)]
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
) -> list[StoragePath]:
    """Remove what `list_prunable` returns for the newest valid checkpoint, and return it.

    A checkpoint is invalidated before its files are removed, so that a kill does not leave a
    partial one. Call this only while no save is running.
    """
    newest, _ = find_newest_valid(checkpoints_dir, verified=verified)
    paths = list_prunable(checkpoints_dir, newest, keep_last, keep_every_steps)
    for path in paths:
        remove_checkpoint(path)
    return paths


def quarantine_checkpoints(checkpoints_dir: StoragePath, after_step: int) -> None:
    """Rename the checkpoints of steps after `after_step` so that runs do not resume from them."""
    for step, path in list_steps(checkpoints_dir).items():
        if step > after_step:
            rename_checkpoint(path, find_unused_name(path, "diverged"))


def _is_intact(path: StoragePath) -> bool:
    try:
        load_manifest(path)
    except CorruptCheckpointError:
        return False
    return True
