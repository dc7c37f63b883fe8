"""Which checkpoint a run resumes from, and which ones it may forget.

Both are decided by what was verified, not by what is newest: a damaged checkpoint counts neither as
the one to resume from nor as one of those that are kept.
"""

import shutil
from pathlib import Path

from hlat.checkpoint import durable
from hlat.checkpoint.errors import CorruptCheckpointError
from hlat.checkpoint.store import TEMPORARY, check_files, step_of, unused_name, verify


def newest_valid(folder: Path, before: int | None = None) -> tuple[Path | None, list[str]]:
    """Find the checkpoint to resume from.

    Args:
        folder: Folder of the run's checkpoints; it need not exist.
        before: A step that it must precede; None: the newest will do.

    Returns:
        The newest checkpoint that was committed and, read in full, is what was written, or None;
        and a sentence for each newer one that was refused, newest first. Refused ones stay where
        they are.
    """
    refused: list[str] = []
    for path in _newest_first(folder, before):
        try:
            verify(path)
            return path, refused
        except CorruptCheckpointError as error:
            refused.append(f"checkpoint {path.name} is refused: {error}")
    return None, refused


def prune(folder: Path, keep_last: int) -> None:
    """Remove checkpoints beyond the newest ones, and what dead writes left behind.

    The newest checkpoint that is kept has been read in full; nothing is removed when no checkpoint
    is valid. Damaged ones are neither counted nor removed. A checkpoint loses its name before its
    files, so a kill never leaves half of one. Call it only while no save is under way.

    Args:
        folder: Folder of the run's checkpoints; it need not exist.
        keep_last: Checkpoints to keep; the newest valid one is kept in any case.
    """
    for leftover in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(leftover)
    newest, _ = newest_valid(folder)
    paths = _newest_first(folder)
    older = paths[paths.index(newest) + 1 :] if newest else []
    for path in [path for path in older if _intact(path)][max(keep_last - 1, 0) :]:
        doomed = path.with_name(f"{TEMPORARY}{path.name}")
        durable.rename(path, doomed)
        shutil.rmtree(doomed)


def set_aside(folder: Path, after: int) -> None:
    """Keep the checkpoints of steps after `after` under names that nobody resumes from."""
    for path in _newest_first(folder):
        if (step_of(path) or 0) > after:
            durable.rename(path, unused_name(path, "diverged"))


def _newest_first(folder: Path, before: int | None = None) -> list[Path]:
    steps = {path: step for path in folder.glob("step_*") if (step := step_of(path)) is not None}
    found = [path for path, step in steps.items() if before is None or step < before]
    return sorted(found, key=lambda path: steps[path], reverse=True)


def _intact(path: Path) -> bool:
    try:
        check_files(path)
    except CorruptCheckpointError:
        return False
    return True
