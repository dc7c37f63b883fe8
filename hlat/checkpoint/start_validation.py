"""Validation of checkpoint.start_from before a run is submitted, without torch."""

from pathlib import Path

from hlat.checkpoint import checkpoint_directory
from hlat.config.config_errors import ConfigError
from hlat.config.run import Config
from hlat.storage.bounded_files import load_json
from hlat.training_state import TrainingState, find_start_problems


def validate_start(config: Config, run_dir: Path) -> None:
    """Raise ConfigError if a run cannot start from the checkpoint of checkpoint.start_from.

    A checkpoint that does not exist yet, is damaged, or is not on a disk of this machine is checked
    when the run starts. A run with own checkpoints resumes from them.
    """
    start = config.checkpoint.start_from
    root = checkpoint_directory.build_checkpoint_root(run_dir, config.checkpoint.destination)
    if start is None or "://" in start or not isinstance(root, Path):
        return
    path = None if _find_newest(root) is not None else _find_newest(Path(start).expanduser())
    try:
        state = None if path is None else TrainingState.from_json(load_json(path / "state.json"))
    except (ConfigError, OSError, ValueError):
        return
    if state is None or not isinstance(state.data.get("fingerprint"), dict):
        return
    if problems := find_start_problems(config, state, str(path)):
        prefix = f"cannot start from checkpoint.start_from at {path}"
        raise ConfigError(*(f"{prefix}: {problem}" for problem in problems))


def _find_newest(source: Path) -> Path | None:
    """Return a checkpoint, or the newest one of a run directory on this machine."""
    if checkpoint_directory.parse_step(source) is not None:
        return source if source.is_dir() else None
    root = checkpoint_directory.load_checkpoint_root(source)
    paths = checkpoint_directory.list_steps(root / "checkpoints")
    found = [path for path in paths.values() if isinstance(path, Path)]
    return found[-1] if found else None
