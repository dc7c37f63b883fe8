"""Which checkpoint a run resumes from, and which ones it may forget.

Both are decided by what was verified, not by what is newest: a damaged checkpoint counts neither as
the one to resume from nor as one of those that are kept.
"""

from collections.abc import Callable
from functools import partial

from hlat.checkpoint import places
from hlat.checkpoint.errors import CorruptCheckpointError
from hlat.checkpoint.places import Place
from hlat.checkpoint.store import check_files, step_of, unused_name, verify
from hlat.parallelism.group import Alone, Group, tell, together


def newest_valid(
    folder: Place,
    before: int | None = None,
    verified: Place | None = None,
    progress: Callable[[int], None] = lambda _: None,
    everyone: Group | None = None,
    rank: int = 0,
) -> tuple[Place | None, list[str]]:
    """Find the checkpoint to resume from.

    Args:
        folder: Folder of the run's checkpoints; it need not exist.
        before: A step that it must precede; None: the newest will do.
        verified: A checkpoint that the caller has just written or read, and that is not read again.
        progress: Hears of every further bytes that were read.
        everyone: Ranks that read it between them, and all call this; None: there is but this one.
        rank: Number of this process among them.

    Returns:
        The newest checkpoint that was committed and, read in full, is what was written, or None;
        and a sentence for each newer one that was refused, newest first. Refused ones stay where
        they are.

    Raises:
        OSError: Whether there is any cannot be told: the folder cannot be listed, or a store does
            not answer.
    """
    everyone, refused = everyone or Alone(), list[str]()
    listed = together(everyone, lambda: _names(folder, before) if everyone.leads else None)
    for path in (folder / name for name in tell(everyone, listed[:1])[0]):
        problem = None if path == verified else problem_of(path, everyone, rank, progress)
        if problem is None:
            return path, refused
        refused.append(f"checkpoint {path.name} is refused: {problem}")
    return None, refused


def problem_of(
    path: Place,
    everyone: Group,
    rank: int = 0,
    progress: Callable[[int], None] = lambda _: None,
) -> str | None:
    """Let ranks read a whole checkpoint between them, each some of its files.

    Args:
        path: The checkpoint's folder.
        everyone: The ranks; all of them call this.
        rank: Number of this process among them.
        progress: Hears of every further bytes that were read here.

    Returns:
        What is wrong with it, on all ranks; None: it is what was written.

    Raises:
        OSError: On all ranks, where a store does not answer.
    """
    num_ranks = tell(everyone, len(everyone.collect(None)))
    found = together(everyone, partial(_problem_of_some, path, progress, rank, num_ranks))
    problems: list[str] = tell(everyone, [problem for problem in found if problem is not None])
    return problems[0] if problems else None


def dispensable(
    folder: Place, newest: Place | None, keep_last: int, keep_every_steps: int | None = None
) -> list[Place]:
    """Checkpoints that need not be kept, and what dead writes left behind.

    Args:
        folder: Folder of the run's checkpoints; it need not exist.
        newest: The newest valid one; None: there is none, and every checkpoint is kept.
        keep_last: Checkpoints to keep, this one among them. Damaged ones are not counted.
        keep_every_steps: Those whose step is a multiple of this are kept as well.

    Returns:
        Their folders, none of them the newest or newer, none damaged.
    """
    paths = _newest_first(folder)
    older = paths[paths.index(newest) + 1 :] if newest else []
    beyond = [path for path in older if _intact(path)][max(keep_last - 1, 0) :]
    leftovers = places.leftovers(folder)
    return leftovers + [path for path in beyond if not _is_multiple(path, keep_every_steps)]


def prune(
    folder: Place,
    keep_last: int,
    keep_every_steps: int | None = None,
    verified: Place | None = None,
) -> list[Place]:
    """Remove checkpoints beyond the newest ones, and what dead writes left behind.

    The newest checkpoint that is kept has been read in full; nothing is removed when no checkpoint
    is valid. Damaged ones are neither counted nor removed. A checkpoint loses its name before its
    files, so a kill never leaves half of one. Call it only while no save is under way.

    Args:
        folder: Folder of the run's checkpoints; it need not exist.
        keep_last: Checkpoints to keep; the newest valid one is kept in any case.
        keep_every_steps: Checkpoints whose step is a multiple of this are kept for ever; None: none
            are.
        verified: A checkpoint that the caller has just written or read, and that is not read again.

    Returns:
        The folders that are gone.
    """
    newest, _ = newest_valid(folder, verified=verified)
    doomed = dispensable(folder, newest, keep_last, keep_every_steps)
    for path in doomed:
        places.remove(path)
    return doomed


def set_aside(folder: Place, after: int) -> None:
    """Keep the checkpoints of steps after `after` under names that nobody resumes from."""
    for path in _newest_first(folder):
        if (step_of(path) or 0) > after:
            places.move(path, unused_name(path, "diverged"))


def _names(folder: Place, before: int | None) -> list[str]:
    return [path.name for path in _newest_first(folder, before)]


def _problem_of_some(
    path: Place, progress: Callable[[int], None], rank: int, num_ranks: int
) -> str | None:
    """What is wrong with the files that this process reads; None: nothing."""
    try:
        verify(path, progress, rank, num_ranks)
    except CorruptCheckpointError as error:
        return str(error)
    return None


def _newest_first(folder: Place, before: int | None = None) -> list[Place]:
    steps = {path: step for path in places.steps(folder) if (step := step_of(path)) is not None}
    found = [path for path, step in steps.items() if before is None or step < before]
    return sorted(found, key=lambda path: steps[path], reverse=True)


def _is_multiple(path: Place, steps: int | None) -> bool:
    step = step_of(path)
    assert step is not None, "only checkpoints that bear the name of a step are listed"
    return steps is not None and step % steps == 0


def _intact(path: Place) -> bool:
    try:
        check_files(path)
    except CorruptCheckpointError:
        return False
    return True
