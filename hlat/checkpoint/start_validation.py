"""Validation of the start of a run from a checkpoint, by their settings and without torch."""

from pathlib import Path

from hlat.checkpoint import checkpoint_directory
from hlat.checkpoint.checkpoint_manifest import COMMIT_MARKER
from hlat.checkpoint.training_state import TrainingState
from hlat.config import run_identity
from hlat.config.batch_steps import count_tokens
from hlat.config.config_errors import ConfigError
from hlat.config.run import Config
from hlat.config.run_steps import compute_total_steps
from hlat.storage.bounded_files import load_json
from hlat.storage.storage_path import StoragePath, parse_storage_path
from hlat.tracking import finished_runs

_SOURCE_PREFIX, _TOKENIZER_KEY = "data.sources.", "data.tokenizer"
"""Keys of the fingerprint of the data that depend on the content of files."""
_SOURCE = "a source"
"""Value of each source where the content of the files is not compared."""


def validate_start(config: Config, run_dir: Path) -> None:
    """Raise ConfigError if a run cannot start from the checkpoint of checkpoint.start_from.

    A checkpoint that does not exist yet, is damaged, or is not on a disk of this machine is checked
    when the run starts. A run with own checkpoints resumes from them.
    """
    start = config.checkpoint.start_from
    root = checkpoint_directory.build_checkpoint_root(run_dir, config.checkpoint.destination)
    if start is None or "://" in start or not isinstance(root, Path):
        return
    if checkpoint_directory.list_steps(root / "checkpoints"):
        return
    source = Path(start).expanduser()
    if not isinstance(checkpoint_directory.load_checkpoint_root(source), Path):
        return
    path = _find_start(source)
    try:
        if not isinstance(path, Path):
            return
        state = TrainingState.from_json(load_json(path / "state.json"))
    except (ConfigError, OSError, ValueError):
        return
    if not isinstance(state.data.get("fingerprint"), dict):
        return
    if problems := find_start_problems(config, state, str(path)):
        prefix = f"cannot start from checkpoint.start_from at {path}"
        raise ConfigError(*(f"{prefix}: {problem}" for problem in problems))


def load_start_digest(config: Config) -> str | None:
    """Return the SHA-256 of the manifest of the checkpoint from which a new run starts.

    None without checkpoint.start_from, and if the checkpoint cannot be read, which the start of the
    run reports.
    """
    start = config.checkpoint.start_from
    if start is None:
        return None
    try:
        path = _find_start(parse_storage_path(start, "checkpoint.start_from"))
        return None if path is None else load_digest(path)
    except (ConfigError, OSError, ValueError):
        return None


def load_digest(path: StoragePath) -> str:
    """Return the SHA-256 of the manifest of a checkpoint, which its commit marker contains.

    Raises:
        OSError: The marker cannot be read.
        ValueError: The marker is damaged.
    """
    return (path / COMMIT_MARKER).read_bytes().decode("ascii")


def find_replaced_start(config: Config, run_dir: Path) -> str | None:
    """Return the problem if checkpoint.start_from is not the checkpoint from which a run started.

    None for a run directory in checkpoint.start_from, since its newest checkpoint may change.
    """
    start = config.checkpoint.start_from
    if start is None or checkpoint_directory.parse_step(Path(start)) is None:
        return None
    recorded = finished_runs.get_start(run_dir).get(finished_runs.START_DIGEST)
    present = load_start_digest(config)
    if None in (recorded, present) or recorded == present:
        return None
    return (
        f"{run_dir} started from a checkpoint with manifest SHA-256 {recorded}, but "
        f"checkpoint.start_from={start} has {present}; to start from this one, choose another "
        f"run.name or move {run_dir} away; to continue the run, set run.name={run_dir.name} and "
        "checkpoint.start_from=null"
    )


def build_last_state(config: Config) -> TrainingState:
    """Return the state in the last checkpoint of a run, as far as the settings determine it."""
    settings = run_identity.collect_data_settings(
        config.data, config.batch, config.run.resolved_data_seed
    )
    sources = {f"{_SOURCE_PREFIX}{name}": _SOURCE for name in config.data.sources}
    step = compute_total_steps(config)
    return TrainingState(
        step=step,
        tokens=count_tokens(step, config.batch),
        data={"fingerprint": settings | sources},
        fixed=run_identity.collect_fixed_settings(config),
        adjustable=run_identity.collect_adjustable_settings(config),
    )


def find_start_problems(
    config: Config, saved: TrainingState, path: str, is_same_run: bool = False
) -> list[str]:
    """Return the reasons why a run cannot start from a checkpoint; empty if it can.

    The content of the data files is compared when the run opens them. `is_same_run` is True for a
    resume of the run that saved the checkpoint.
    """
    if saved.weights_only:
        return [
            "it contains weights only, and a run also needs the optimizer state and the position "
            f"in the data; to start a new run from the weights: hlat export {path} output=DIR, "
            "then model.init_from=DIR instead of checkpoint.start_from"
        ]
    current = build_last_state(config)
    fixed, remedy = saved.fixed, "set it back or choose another run.name"
    if not is_same_run:  # a branch may have initial weights of another origin
        origin = run_identity.INITIAL_WEIGHTS_DEFAULTS
        fixed = {key: value for key, value in fixed.items() if key not in origin}
        remedy = "set it back or choose another checkpoint.start_from"
    differences = run_identity.find_differences(fixed, current.fixed)
    problems = [f"{line}; {remedy}" for line in differences]
    settings = current.data["fingerprint"]
    recorded = {
        key: _SOURCE if key.startswith(_SOURCE_PREFIX) else value
        for key, value in saved.data["fingerprint"].items()
        if key != _TOKENIZER_KEY
    }
    problems += run_identity.compare_data_settings(settings, recorded, config.data.allow_changed)[1]
    if not is_same_run and current.step <= saved.step:
        problems.append(
            f"it has step {saved.step:,}, and the run ends at step {current.step:,}; increase "
            "run.steps, schedule.total_steps or the phase"
        )
    return problems


def _find_start(source: StoragePath) -> StoragePath | None:
    """Return a checkpoint, or the newest one of a run directory."""
    if checkpoint_directory.parse_step(source) is not None:
        return source if source.is_dir() else None
    root = checkpoint_directory.load_checkpoint_root(source)
    checkpoints_dir = checkpoint_directory.find_checkpoints_dir(root)
    return next(iter(checkpoint_directory.list_newest_first(checkpoints_dir)), None)
