"""Lookup of the checkpoint for a run directory, checkpoint directory or URL."""

import difflib
from pathlib import Path

from hlat.checkpoint import checkpoint_directory, checkpoint_store, retention
from hlat.config.config_errors import ConfigError
from hlat.storage import storage_path
from hlat.storage.remote_path import StorageUnavailableError
from hlat.storage.storage_path import StoragePath


def find_checkpoint(
    source: StoragePath, step: int | None, trusted_keys: str | None = None
) -> tuple[StoragePath, list[str]]:
    """Return a verified checkpoint, and one message for each newer checkpoint that is damaged.

    `source` is a run directory, which may record another location of its checkpoints, a directory
    of checkpoints, or a checkpoint. Without `step`, the newest is selected. A `step` may also be
    that of weights in milestones/. With `trusted_keys`, a file of public keys, the checkpoint must
    be signed with one of them.

    Raises:
        ConfigError: If there is no such checkpoint, it is damaged or not signed, or a store does
            not respond.
    """
    try:
        return _find_in_root(find_checkpoint_root(source), step, trusted_keys)
    except StorageUnavailableError as error:
        raise storage_path.build_unusable_error(str(source), error) from error


def find_checkpoint_root(source: StoragePath) -> StoragePath:
    """Return the checkpoint root recorded in a run directory, by default the directory itself.

    Raises:
        ConfigError: If the directory does not exist.
        StorageUnavailableError: If the store does not respond.
    """
    root = checkpoint_directory.load_checkpoint_root(source)
    reason = "which does not exist"
    try:
        if root.is_dir():
            return root
    except StorageUnavailableError:
        raise
    except OSError as error:  # for example of a name that is too long
        if root == source:
            raise ConfigError(f"{root}: {error.strerror}; specify a run directory") from error
        reason = f"which cannot be opened ({error.strerror})"
    if root != source:
        raise ConfigError(
            f"{source / checkpoint_directory.DESTINATION_FILE} contains {root}, {reason}; correct "
            "it, or remove it if the checkpoints are in the run directory"
        )
    problem = "is a file" if root.exists() else "does not exist"
    raise ConfigError(f"{root} {problem}; specify a run directory{_suggest_similar_name(root)}")


def build_no_checkpoint_error(directory: StoragePath) -> ConfigError:
    """Return the error for a directory without checkpoints."""
    return ConfigError(
        f"{directory} contains no checkpoint; specify a run directory, such as runs/<run.name>, "
        "that has saved, or one of its checkpoints"
    )


def _find_in_root(
    checkpoint_root: StoragePath, step: int | None, trusted_keys: str | None
) -> tuple[StoragePath, list[str]]:
    if checkpoint_store.is_checkpoint(checkpoint_root):
        if step is not None:
            raise ConfigError(
                f"{checkpoint_root} is a checkpoint; step= selects from a run directory"
            )
        checkpoint_store.verify_checkpoint(checkpoint_root, trusted_keys=trusted_keys)
        return checkpoint_root, []
    checkpoints_dir = checkpoint_root / "checkpoints"
    if not checkpoints_dir.is_dir():
        checkpoints_dir = checkpoint_root
    paths = checkpoint_directory.list_steps(checkpoints_dir)
    if not paths:
        raise build_no_checkpoint_error(checkpoint_root)
    if step is None:
        newest, problems = retention.find_newest_checkpoint(
            checkpoints_dir, trusted_keys=trusted_keys
        )
        if newest is None:
            raise ConfigError(*problems, f"{checkpoint_root} contains no valid checkpoint")
        return newest.path, problems
    paths = checkpoint_directory.list_steps(checkpoint_root / "milestones") | paths
    if step not in paths:
        available = ", ".join(map(str, sorted(paths)))
        raise ConfigError(
            f"step={step}: {checkpoint_root} has no such checkpoint, only {available}"
        )
    checkpoint_store.verify_checkpoint(paths[step], trusted_keys=trusted_keys)
    return paths[step], []


def _suggest_similar_name(path: StoragePath) -> str:
    parent = path.absolute().parent if isinstance(path, Path) else path.parent
    sizes = storage_path.list_sizes(parent) if parent.is_dir() else {}
    directories = [name for name, size in sizes.items() if size is None]
    matches = difflib.get_close_matches(path.name, directories, 1)
    return f", such as {path.with_name(matches[0])}" if matches else ""
