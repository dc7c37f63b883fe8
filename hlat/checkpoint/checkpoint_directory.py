"""Names and locations of checkpoint directories, and their creation, renaming and removal.

On a local disk a checkpoint is written to a temporary directory and renamed. Object stores have no
rename: files are written under their final names, the commit marker last. A remote directory
without the marker is an incomplete checkpoint, which is ignored by readers and removed by the next
save or prune. `commit_checkpoint` (checkpoint_store.py) commits a checkpoint on all ranks.
"""

import os
import re
import shutil
from itertools import count
from pathlib import Path

from hlat.checkpoint.checkpoint_manifest import COMMIT_MARKER
from hlat.config.config_errors import ConfigError
from hlat.config.redaction import expand_text, redact_text, uses_other_variables
from hlat.storage import durable_files, storage_path
from hlat.storage.remote_path import RemotePath
from hlat.storage.storage_path import TEMPORARY_PREFIX, StoragePath, parse_storage_path

DESTINATION_FILE = "checkpoints_are_in.txt"
"""File in a run directory that contains the location of its checkpoints if they are elsewhere."""

OWNER_FILE = "run_directory.txt"
"""File in a checkpoint root outside of the run directory, which contains the run directory."""

_MARKER_BYTES = 64
_MAX_LOCATION_BYTES = 4096
_STEP_DIR = re.compile(r"step_(\d{8,})")


def build_checkpoint_root(run_dir: Path, destination: str | None) -> StoragePath:
    """Return the directory of a run's checkpoint directories, given checkpoint.destination.

    Raises:
        ConfigError: If the destination cannot be opened.
    """
    if destination is None:
        return run_dir
    return parse_storage_path(destination, "checkpoint.destination") / run_dir.name


def load_checkpoint_root(run_dir: StoragePath) -> StoragePath:
    """Return the checkpoint root recorded in a run directory, by default the run directory.

    Raises:
        ConfigError: If the recorded URL cannot be opened, or the record is damaged.
    """
    if not isinstance(run_dir, Path) or not (run_dir / DESTINATION_FILE).is_file():
        return run_dir
    path = run_dir / DESTINATION_FILE
    location = _read_location(path)
    if "://" in location and uses_other_variables(location):  # it would be sent to the server
        raise ConfigError(
            f"{path}: {location} has a variable of the environment, which may be secret; specify "
            "the directory of the checkpoints itself"
        )
    return parse_storage_path(expand_text(location), str(path))


def _read_location(path: Path) -> str:
    try:
        content = path.read_bytes()
        location = content.decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
    else:
        if location and location.isprintable() and len(content) <= _MAX_LOCATION_BYTES:
            return location
        reason = "it contains no path or URL"
    raise ConfigError(
        f"{path} cannot be read ({reason}); write the directory of the checkpoints into it, or "
        f"remove it if they are in {path.parent}"
    )


def save_checkpoint_root(run_dir: Path, checkpoint_root: StoragePath) -> None:
    """Record the checkpoint root in the run directory, and the run directory in the root.

    Both paths are redacted. Readers expand them.
    """
    path = run_dir / DESTINATION_FILE
    if checkpoint_root == run_dir:
        path.unlink(missing_ok=True)
        return
    location = checkpoint_root.absolute() if isinstance(checkpoint_root, Path) else checkpoint_root
    durable_files.replace_file(path, redact_text(f"{location}\n").encode())
    owner = redact_text(f"{run_dir.absolute()}\n").encode()
    if isinstance(checkpoint_root, Path):
        checkpoint_root.mkdir(parents=True, exist_ok=True)
    durable_files.replace_file(checkpoint_root / OWNER_FILE, owner)


def validate_ownership(run_dir: Path, checkpoint_root: StoragePath) -> None:
    """Raise ConfigError unless the checkpoints in a root were written by the run.

    The run directory may be from others, and name checkpoints of another run.
    """
    problem = None
    if checkpoint_root != run_dir:
        path = checkpoint_root / OWNER_FILE
        owner = path.read_bytes().decode(errors="replace").strip() if path.exists() else None
        if owner is None or expand_text(owner) != str(run_dir.absolute()):
            problem = f"the checkpoints in {checkpoint_root} belong to {owner or 'another run'}"
    elif (link := checkpoint_root / "checkpoints").is_symlink():
        problem = f"{link} is a symbolic link to {link.resolve()}"
    if problem is not None:
        raise ConfigError(
            f"{run_dir}: {problem}; specify the directory of the run that wrote them. If the run "
            "directory was moved, resume the run first, which records its new path"
        )


def validate_destination(run_dir: Path, destination: str | None) -> None:
    """Check that checkpoints can be written to checkpoint.destination, and record it in `run_dir`.

    An unwritable one would fail at the first save, a changed one restart the run from step 0.

    Raises:
        ConfigError: The destination does not accept a small file, or earlier checkpoints of the run
            are in another place.
    """
    root = build_checkpoint_root(run_dir, destination)
    setting = f"checkpoint.destination={destination or 'null'}"
    try:
        if root != run_dir:
            storage_path.validate_writable(root)
        previous = load_checkpoint_root(run_dir)
        if (
            previous != root
            and list_steps(previous / "checkpoints")
            and not list_steps(root / "checkpoints")
        ):
            raise ConfigError(
                f"{setting}: the checkpoints of {run_dir} are in {previous}; set it back, or copy "
                f"{previous / 'checkpoints'} to {root / 'checkpoints'}"
            )
        save_checkpoint_root(run_dir, root)
    except OSError as error:
        raise storage_path.build_unusable_error(setting, error) from error


def format_step_name(step: int) -> str:
    """Return the directory name of a step."""
    return f"step_{step:08d}"


def parse_step(path: StoragePath) -> int | None:
    """Return the step of a checkpoint directory's name; None for other names."""
    match = _STEP_DIR.fullmatch(path.name)
    return int(match[1]) if match else None


def find_unused_name(path: StoragePath, reason: str) -> str:
    """Return an unused name for a quarantined checkpoint, such as step_00000020_damaged_1."""
    names = (f"{path.name}_{reason}_{number}" for number in count(1))
    return next(name for name in names if not path.with_name(name).exists())


def list_steps(checkpoints_dir: StoragePath) -> dict[int, StoragePath]:
    """Return the committed checkpoints, valid or damaged, by step in ascending order.

    Raises:
        OSError: If the directory exists and cannot be listed.
    """
    if isinstance(checkpoints_dir, Path) and not checkpoints_dir.is_dir():
        return {}
    paths = sorted(list[StoragePath](checkpoints_dir.iterdir()), key=str)
    steps = {step: path for path in paths if (step := parse_step(path)) is not None}
    return {step: steps[step] for step in sorted(steps) if has_checkpoint(steps[step])}


def list_newest_first(
    checkpoints_dir: StoragePath, before_step: int | None = None
) -> list[StoragePath]:
    """Return the committed checkpoints, those before a step if it is given, the newest first."""
    steps = reversed(list_steps(checkpoints_dir).items())
    return [path for step, path in steps if before_step is None or step < before_step]


def find_checkpoints_dir(checkpoint_root: StoragePath) -> StoragePath:
    """Return `checkpoints/` of a root; the root itself if it contains the checkpoints."""
    directory = checkpoint_root / "checkpoints"
    return directory if directory.is_dir() else checkpoint_root


def list_incomplete_dirs(checkpoints_dir: StoragePath) -> list[StoragePath]:
    """Return the remains of interrupted writes; call this only while no save is running."""
    if isinstance(checkpoints_dir, Path):
        return [*sorted(checkpoints_dir.glob(f"{TEMPORARY_PREFIX}*"))]
    paths = checkpoints_dir.iterdir()
    return [path for path in paths if path.name.startswith("step_") and not has_checkpoint(path)]


def has_checkpoint(path: StoragePath) -> bool:
    """Return True if a committed checkpoint, valid or damaged, has this path.

    A truncated marker does not count: some file systems write files in parts.
    """
    if isinstance(path, Path):
        return path.exists()
    size = path.list_sizes().get(COMMIT_MARKER, 0)
    return size is None or size >= _MARKER_BYTES


def create_checkpoint_dir(target: StoragePath) -> StoragePath:
    """Create and return the directory to write before `publish_checkpoint` makes it `target`."""
    if isinstance(target, RemotePath):
        target.remove()
        return target
    durable_files.make_directory(target.parent)
    temporary = target.with_name(f"{TEMPORARY_PREFIX}{target.name}-{os.getpid()}")
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir()
    return temporary


def publish_checkpoint(checkpoint_dir: StoragePath, name: str) -> None:
    """Rename a completely written directory; a remote one is published by its marker."""
    if isinstance(checkpoint_dir, Path):
        durable_files.fsync_directory(checkpoint_dir)
        durable_files.rename_durably(checkpoint_dir, checkpoint_dir.with_name(name))


def remove_checkpoint(path: StoragePath) -> None:
    """Remove a checkpoint or an incomplete directory.

    The checkpoint is invalidated first: a local directory is renamed, a remote one loses its
    marker.
    """
    if isinstance(path, RemotePath):
        (path / COMMIT_MARKER).unlink()
        path.remove()
        return
    if not path.name.startswith(TEMPORARY_PREFIX):
        temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}")
        durable_files.rename_durably(path, temporary)
        path = temporary
    shutil.rmtree(path)


def rename_checkpoint(path: StoragePath, name: str) -> None:
    """Rename a checkpoint within its directory; a remote one is copied and removed."""
    if isinstance(path, Path):
        durable_files.rename_durably(path, path.with_name(name))
        return
    files = [file for file, size in path.list_sizes().items() if size is not None]
    for file in sorted(files, key=lambda file: file == COMMIT_MARKER):
        (path / file).copy_to(path.with_name(name) / file)
    remove_checkpoint(path)
