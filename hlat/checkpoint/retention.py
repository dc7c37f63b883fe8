"""Which checkpoint a run resumes from, and which ones it may forget.

Both are decided by what was verified, not by what is newest: a damaged checkpoint counts neither as
the one to resume from nor as one of those that are kept.
"""

from collections.abc import Callable

from hlat.checkpoint import places
from hlat.checkpoint.errors import CorruptCheckpointError
from hlat.checkpoint.places import Place
from hlat.checkpoint.store import check_files, step_of, unused_name, verify


def newest_valid(
    folder: Place,
    before: int | None = None,
    verified: Place | None = None,
    tell: Callable[[int], None] = lambda _: None,
) -> tuple[Place | None, list[str]]:
    """Find the checkpoint to resume from.

    Args:
        folder: Folder of the run's checkpoints; it need not exist.
        before: A step that it must precede; None: the newest will do.
        verified: A checkpoint that the caller has just written or read, and that is not read again.
        tell: Hears of every further bytes that were read.

    Returns:
        The newest checkpoint that was committed and, read in full, is what was written, or None;
        and a sentence for each newer one that was refused, newest first. Refused ones stay where
        they are.

    Raises:
        OSError: Whether there is any cannot be told: the folder cannot be listed, or a store does
            not answer.
    """
    refused: list[str] = []
    for path in _newest_first(folder, before):
        try:
            if path != verified:
                verify(path, tell)
            return path, refused
        except CorruptCheckpointError as error:
            refused.append(f"checkpoint {path.name} is refused: {error}")
    return None, refused


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
