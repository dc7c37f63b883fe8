"""Permanent checkpoints of a run during its training.

Checkpoints that the run will delete are not evaluated, since their scores could not be reproduced.
After the end of the run, its last checkpoint counts as permanent.
"""

import time
from pathlib import Path

from hlat.checkpoint import checkpoint_directory, checkpoint_lookup
from hlat.checkpoint.checkpoint_manifest import COMMIT_MARKER
from hlat.config.config_errors import ConfigError
from hlat.config.recorded_config import load_recorded_settings
from hlat.inference import model_source
from hlat.inference.model_source import ModelSource
from hlat.storage.storage_path import StoragePath
from hlat.tracking.jsonl_log import open_events_log
from hlat.tracking.lost_work import START_EVENTS

POLL_INTERVAL_S = 30.0
_END_EVENTS = ("finish", "diverge", "give_up")


def list_permanent_checkpoints(run_dir: Path) -> list[StoragePath]:
    """Return the complete permanent checkpoints of a run, sorted by step."""
    root = checkpoint_lookup.find_checkpoint_root(run_dir)
    every, milestones = load_recorded_settings(
        run_dir, "checkpoint.keep_every_steps", "checkpoint.milestone_tokens"
    )
    checkpoints = _list_complete_checkpoints(root / "checkpoints")
    permanent = {step: path for step, path in checkpoints.items() if every and step % every == 0}
    if milestones:
        permanent |= _list_complete_checkpoints(root / "milestones")
    if checkpoints and has_run_ended(run_dir):
        permanent.setdefault(max(checkpoints), checkpoints[max(checkpoints)])
    return [path for _, path in sorted(permanent.items())]


def wait_for_first_checkpoint(run_dir: Path, tokenizer_path: Path | None) -> ModelSource:
    """Wait for the first permanent checkpoint of a run, and return its model.

    Raise ConfigError if the run has ended without a checkpoint.
    """
    while not (checkpoints := list_permanent_checkpoints(run_dir)):
        if has_run_ended(run_dir):
            raise ConfigError(f"{run_dir} has ended and contains no checkpoint")
        time.sleep(POLL_INTERVAL_S)
    return model_source.open_checkpoint(checkpoints[0], run_dir, tokenizer_path)


def has_run_ended(run_dir: Path) -> bool:
    """Return True if the events of a run state that it will save no more checkpoints."""
    events = [row["event"] for row in open_events_log(run_dir).read_rows()]
    events = [event for event in events if event in (*START_EVENTS, *_END_EVENTS)]
    return bool(events) and events[-1] in _END_EVENTS


def _list_complete_checkpoints(directory: StoragePath) -> dict[int, StoragePath]:
    paths = checkpoint_directory.list_steps(directory)
    return {step: path for step, path in paths.items() if (path / COMMIT_MARKER).exists()}
