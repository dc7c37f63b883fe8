"""Selection of the checkpoint to resume from, and removal of old checkpoints.

Both consider valid checkpoints only. A damaged checkpoint is not resumed from and does not count
towards `checkpoint.keep_last`.
"""

from collections.abc import Callable

from hlat.checkpoint import checkpoint_directory
from hlat.checkpoint.checkpoint_errors import CorruptCheckpointError
from hlat.checkpoint.checkpoint_store import (
    find_unused_name,
    load_manifest,
    parse_step,
    verify_checkpoint,
)
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

    Args:
        checkpoints_dir: Directory of the run's checkpoints; it may not exist.
        before_step: If given, only earlier steps are considered.
        verified: Checkpoint that the caller has just written or read; it is not read again.
        on_progress: Called with the number of bytes of each read.
        process_group: Ranks that divide the files; all of them call this function. Defaults to a
            single process.
        rank: Rank of this process in the group.

    Returns:
        The checkpoint or None, and one message for each newer checkpoint that is damaged, newest
        first.

    Raises:
        OSError: If the directory cannot be listed or a store does not respond.
    """
    group, problems = process_group or SingleProcessGroup(), list[str]()

    def list_names() -> list[str] | None:
        if not group.is_rank0:
            return None
        return [path.name for path in _list_newest_first(checkpoints_dir, before_step)]

    names = broadcast_object(group, run_on_all(group, list_names)[:1])[0]
    for path in (checkpoints_dir / name for name in names):
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
    problems: list[str] = broadcast_object(
        process_group, [problem for problem in results if problem is not None]
    )
    return problems[0] if problems else None


def list_prunable(
    checkpoints_dir: StoragePath,
    newest: StoragePath | None,
    keep_last: int,
    keep_every_steps: int | None = None,
) -> list[StoragePath]:
    """Return the intact checkpoints to remove and the remains of interrupted writes.

    Args:
        checkpoints_dir: Directory of the run's checkpoints; it may not exist.
        newest: Newest valid checkpoint; only older ones are returned, none if it is None.
        keep_last: Number of checkpoints to retain including `newest`; damaged ones do not count.
        keep_every_steps: If given, checkpoints at multiples of this step are retained.
    """
    paths = _list_newest_first(checkpoints_dir)
    older = paths[paths.index(newest) + 1 :] if newest else []
    surplus = [path for path in older if _is_intact(path)][max(keep_last - 1, 0) :]
    return checkpoint_directory.list_incomplete_dirs(checkpoints_dir) + [
        path
        for path in surplus
        if keep_every_steps is None or (parse_step(path) or 0) % keep_every_steps
    ]


def prune_checkpoints(
    checkpoints_dir: StoragePath,
    keep_last: int,
    keep_every_steps: int | None = None,
    verified: StoragePath | None = None,
) -> list[StoragePath]:
    """Remove old checkpoints and the remains of interrupted writes.

    The newest checkpoint is verified first; if no checkpoint is valid, none is removed. A
    checkpoint is invalidated before its files are removed, so that a kill does not leave a partial
    one. Call this only while no save is running.

    Returns the removed directories. For the arguments see `find_newest_valid` and `list_prunable`.
    """
    newest, _ = find_newest_valid(checkpoints_dir, verified=verified)
    paths = list_prunable(checkpoints_dir, newest, keep_last, keep_every_steps)
    for path in paths:
        checkpoint_directory.remove_checkpoint(path)
    return paths


def quarantine_checkpoints(checkpoints_dir: StoragePath, after_step: int) -> None:
    """Rename the checkpoints of steps after `after_step` so that runs do not resume from them."""
    for path in _list_newest_first(checkpoints_dir):
        if (parse_step(path) or 0) > after_step:
            checkpoint_directory.rename_checkpoint(path, find_unused_name(path, "diverged"))


def _list_newest_first(
    checkpoints_dir: StoragePath, before_step: int | None = None
) -> list[StoragePath]:
    paths = checkpoint_directory.list_step_dirs(checkpoints_dir)
    steps = {path: step for path in paths if (step := parse_step(path)) is not None}
    selected = [path for path, step in steps.items() if before_step is None or step < before_step]
    return sorted(selected, key=lambda path: steps[path], reverse=True)


def _is_intact(path: StoragePath) -> bool:
    try:
        load_manifest(path)
    except CorruptCheckpointError:
        return False
    return True
