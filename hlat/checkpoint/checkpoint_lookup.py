"""Selection of a checkpoint: the newest (latest) valid one, or that of a run, step or URL."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hlat.checkpoint import checkpoint_directory, checkpoint_store
from hlat.checkpoint.checkpoint_errors import CorruptCheckpointError
from hlat.checkpoint.checkpoint_manifest import CheckpointManifest
from hlat.config.config_errors import ConfigError
from hlat.distributed.object_group import (
    ObjectGroup,
    SingleRankGroup,
    broadcast_object,
    run_and_reduce,
    run_on_rank0,
)
from hlat.storage import storage_path
from hlat.storage.remote_path import StorageUnavailableError
from hlat.storage.storage_path import StoragePath


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """Checkpoint with contents that match its hashes, and its manifest."""

    path: StoragePath
    manifest: CheckpointManifest


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
        paths = checkpoint_directory.list_newest_first(checkpoints_dir, before_step)
        return [path.name for path in paths]

    for path in (checkpoints_dir / name for name in run_on_rank0(group, list_names)):
        try:
            if path == verified:
                manifest = checkpoint_store.load_shared_manifest(path, group)
                return VerifiedCheckpoint(path, manifest), problems
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
    manifest = checkpoint_store.load_shared_manifest(path, process_group, trusted_keys)
    names = [*manifest.files][process_group.rank :: process_group.size]

    def find_problem() -> str | None:
        try:
            checkpoint_store.verify_files(path, manifest, names, on_progress)
        except CorruptCheckpointError as error:
            return str(error)
        return None

    problem = run_and_reduce(process_group, find_problem, lambda found: found[0])
    if (problem := broadcast_object(process_group, problem)) is not None:
        raise CorruptCheckpointError(problem)
    return VerifiedCheckpoint(path, manifest)


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
    checkpoints_dir = checkpoint_directory.find_checkpoints_dir(checkpoint_root)
    paths = checkpoint_directory.list_steps(checkpoints_dir)
    if not paths:
        raise build_no_checkpoint_error(checkpoint_root)
    if step is None:
        newest, problems = find_newest_checkpoint(checkpoints_dir, trusted_keys=trusted_keys)
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
