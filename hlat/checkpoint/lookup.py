"""The checkpoint that a user means who names a run.

A run's folder is what people know; which of its checkpoints is the newest that can be trusted is
for the store to find out.
"""

import difflib
from pathlib import Path

from hlat.checkpoint import places, retention, store
from hlat.checkpoint.errors import CorruptCheckpointError
from hlat.checkpoint.places import Place
from hlat.checkpoint.remote import UnansweredError
from hlat.config.errors import ConfigError


def find(source: Place, step: int | None) -> tuple[Place, list[str]]:
    """Return a checkpoint that, read in full, is what was written.

    Args:
        source: A run's folder, which may tell of another place, its folder of checkpoints, or a
            checkpoint.
        step: The step to take from a run; None: the newest.

    Returns:
        The checkpoint's folder, and a sentence for each newer one that was refused.

    Raises:
        ConfigError: There is none, the one that was named is damaged, or a store does not answer.
    """
    try:
        return _find(home(source), step)
    except UnansweredError as error:
        raise places.unusable(str(source), error) from error


def home(source: Place) -> Place:
    """Return the folder that is meant: the run's own, or the one that a file in it tells of.

    Raises:
        ConfigError: There is no such folder.
    """
    found = places.recorded(source)
    if found == source:
        refuse_missing(source)
    elif not found.is_dir():
        raise ConfigError(f"{source} has its checkpoints in {found}, and none is there")
    return found


def _find(source: Place, step: int | None) -> tuple[Place, list[str]]:
    if store.is_checkpoint(source):
        if step is not None:
            raise ConfigError(f"{source} is one checkpoint; --step chooses from a run's folder")
        return _verified(source), []
    folder = source / "checkpoints" if (source / "checkpoints").is_dir() else source
    steps = [s for path in places.steps(folder) if (s := store.step_of(path)) is not None]
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


def refuse_missing(source: Place) -> None:
    """Return if a folder is there.

    Raises:
        ConfigError: It is not, or is a file.
    """
    if not source.is_dir():
        problem = "is a file" if source.exists() else "does not exist"
        raise ConfigError(f"{source} {problem}; name a run's folder{_near(source)}")


def nothing_in(source: Place) -> ConfigError:
    """What to tell who names a folder without a checkpoint."""
    return ConfigError(
        f"{source} holds no checkpoint; name a run's folder, such as runs/<run.name>, that "
        "has saved, or one of its checkpoints"
    )


def _verified(path: Place) -> Place:
    try:
        store.verify(path)
    except CorruptCheckpointError as error:
        raise ConfigError(str(error)) from error
    return path


def _near(path: Place) -> str:
    """The folder beside it with a name like it, if there is one."""
    parent = path.absolute().parent if isinstance(path, Path) else path.parent
    beside = places.sizes(parent) if parent.is_dir() else {}
    names = [name for name, size in beside.items() if size is None]
    near = difflib.get_close_matches(path.name, names, 1)
    return f", such as {path.with_name(near[0])}" if near else ""
