"""The checkpoint that a user means who names a run.

A run's folder is what people know; which of its checkpoints is the newest that can be trusted is
for the store to find out.
"""

import difflib
from pathlib import Path

from hlat.checkpoint import retention, store
from hlat.checkpoint.errors import CorruptCheckpointError
from hlat.config.errors import ConfigError


def find(source: Path, step: int | None) -> tuple[Path, list[str]]:
    """Return a checkpoint that, read in full, is what was written.

    Args:
        source: A run's folder, its folder of checkpoints, or a checkpoint.
        step: The step to take from a run; None: the newest.

    Returns:
        The checkpoint's folder, and a sentence for each newer one that was refused.

    Raises:
        ConfigError: There is none, or the one that was named is damaged.
    """
    refuse_missing(source)
    if store.is_checkpoint(source):
        if step is not None:
            raise ConfigError(f"{source} is one checkpoint; --step chooses from a run's folder")
        return _verified(source), []
    folder = source / "checkpoints" if (source / "checkpoints").is_dir() else source
    steps = [s for path in folder.iterdir() if (s := store.step_of(path)) is not None]
    if not steps:
        raise nothing_in(source)
    if step is not None:
        if step not in steps:
            there = ", ".join(map(str, sorted(steps)))
            raise ConfigError(f"--step={step}: {source} has no such checkpoint, only {there}")
        return _verified(folder / store.step_name(step)), []
    newest, refused = retention.newest_valid(folder)
    if newest is None:
        raise ConfigError(*refused, f"{source} holds no valid checkpoint")
    return newest, refused


def refuse_missing(source: Path) -> None:
    """Return if a folder is there.

    Raises:
        ConfigError: It is not, or is a file.
    """
    if not source.is_dir():
        problem = "is a file" if source.exists() else "does not exist"
        raise ConfigError(f"{source} {problem}; name a run's folder{_near(source)}")


def nothing_in(source: Path) -> ConfigError:
    """What to tell who names a folder without a checkpoint."""
    return ConfigError(
        f"{source} holds no checkpoint; name a run's folder, such as runs/<run.name>, that "
        "has saved, or one of its checkpoints"
    )


def _verified(path: Path) -> Path:
    try:
        store.verify(path)
    except CorruptCheckpointError as error:
        raise ConfigError(str(error)) from error
    return path


def _near(path: Path) -> str:
    """The folder beside it with a name like it, if there is one."""
    parent = path.absolute().parent
    names = [entry.name for entry in parent.iterdir() if entry.is_dir()] if parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, 1)
    return f", such as {path.with_name(near[0])}" if near else ""
