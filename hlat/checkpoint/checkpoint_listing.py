"""Listing of the checkpoints in a run directory without reading their tensors.

Names and sizes are compared with the manifest, and only the small files are hashed.
"""

import re
from contextlib import suppress
from dataclasses import dataclass, replace

from hlat.checkpoint import checkpoint_directory, checkpoint_lookup, checkpoint_store
from hlat.checkpoint.checkpoint_manifest import COMMIT_MARKER
from hlat.checkpoint.training_state import TrainingState
from hlat.config.config_errors import ConfigError
from hlat.distributed.state_shard import BUFFERS
from hlat.storage import storage_path
from hlat.storage.storage_path import TEMPORARY_PREFIX, StoragePath

AVERAGES_DIR = "averages"
"""Directory of averages, always in the run directory."""

_QUARANTINED_NAME = re.compile(r"step_(\d{8,})_(damaged|diverged)_\d+")
_TEMPORARY_NAME = re.compile(re.escape(TEMPORARY_PREFIX) + r"step_(\d{8,})")


@dataclass(frozen=True)
class CheckpointInfo:
    """Summary of a checkpoint; `step`, `tokens` and `kind` are None if unknown.

    Attributes:
        written: Time of the last change in seconds since 1970.
        kind: `full`, or `weights only` if runs cannot resume from it.
        state: `committed`; `incomplete` without a marker, as during a save; `damaged` if the files
            contradict the manifest; or the reason in the name of a quarantined checkpoint.
        problem: Details if the checkpoint is damaged.
    """

    path: StoragePath
    step: int | None
    tokens: int | None
    written: float
    num_bytes: int
    kind: str | None
    state: str
    problem: str | None = None


def list_checkpoints(run_dir: StoragePath) -> list[CheckpointInfo]:
    """Return the checkpoints in a run or checkpoint directory, by directory and step.

    Raises:
        ConfigError: If the directory does not exist or contains no checkpoint.
    """
    root = checkpoint_lookup.find_checkpoint_root(run_dir)
    if checkpoint_store.is_checkpoint(run_dir):
        return [_inspect_checkpoint(run_dir)]
    candidates = [root / "checkpoints", root / "milestones", run_dir / AVERAGES_DIR]
    directories = [directory for directory in candidates if directory.is_dir()] or [run_dir]
    checkpoints = [info for directory in directories for info in _list_directory(directory)]
    if not checkpoints:
        raise checkpoint_lookup.build_no_checkpoint_error(run_dir)
    return checkpoints


def is_active(path: StoragePath) -> bool:
    """Return False if a directory is temporary or quarantined."""
    return not (path.name.startswith(TEMPORARY_PREFIX) or _QUARANTINED_NAME.fullmatch(path.name))


def _list_directory(directory: StoragePath) -> list[CheckpointInfo]:
    checkpoints = []
    for path in directory.iterdir():
        with suppress(FileNotFoundError):  # a training run may remove checkpoints concurrently
            if path.is_dir() and (checkpoint_store.is_checkpoint(path) or not is_active(path)):
                checkpoints.append(_inspect_checkpoint(path))
    return sorted(checkpoints, key=lambda c: (-1 if c.step is None else c.step, c.path.name))


def _inspect_checkpoint(path: StoragePath) -> CheckpointInfo:
    quarantined = _QUARANTINED_NAME.fullmatch(path.name)
    match = quarantined or _TEMPORARY_NAME.match(path.name)
    step = checkpoint_directory.parse_step(path) if match is None else int(match[1])
    sizes = {n: size for n, size in storage_path.list_sizes(path).items() if size is not None}
    times = [storage_path.get_modified_time(path / name) for name in sizes]
    written = max(times) if times else storage_path.get_modified_time(path)
    info = CheckpointInfo(path, step, None, written, sum(sizes.values()), None, "incomplete")
    if path.name.startswith(TEMPORARY_PREFIX) or not (path / COMMIT_MARKER).exists():
        return info
    try:
        manifest = checkpoint_store.load_manifest(path)
        state = TrainingState.from_json(checkpoint_store.load_state_json(path, manifest))
    except ConfigError as error:
        return replace(info, state="damaged", problem=str(error))
    only_weights = all(name.startswith(("weights/", f"{BUFFERS}/")) for name in manifest.tensors)
    kind = "weights only" if only_weights or state.weights_only else "full"
    status = quarantined[2] if quarantined else "committed"
    return replace(info, step=manifest.step, tokens=state.tokens, kind=kind, state=status)
