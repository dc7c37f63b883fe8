"""Held jobs of Slurm that a training job releases when a checkpoint exists.

An evaluation of a milestone is submitted before the run has started, and held. The attempts of the
run's job list the held jobs periodically (docs/adr/0044-campaigns-are-commands.md).
"""

import threading
import time
from pathlib import Path

from hlat.config.config_errors import ConfigError
from hlat.jobs import slurm_commands
from hlat.tracking.jsonl_log import JsonlLog

_POLL_INTERVAL_S = 30.0


class HeldJobs:
    """Held jobs of a run: a log in the directory of its submissions."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._log = JsonlLog(run_dir / "submissions/held.jsonl")
        self._released: set[str] = set()

    def append(self, job_id: str, step: int) -> None:
        """Add a held job that waits for the checkpoint of a step."""
        self._log.append({"job": job_id, "step": step})

    def release_ready(self) -> None:
        """Release the held jobs with an existing checkpoint.

        A job that cannot be released is ignored: it may have been cancelled, or Slurm does not
        answer, and the next call repeats the request.
        """
        for row in self._log.read_rows():
            job_id = str(row["job"])
            if job_id not in self._released and has_checkpoint(self._run_dir, row["step"]):
                try:
                    slurm_commands.release_job(job_id)
                except ConfigError:
                    continue
                self._released.add(job_id)

    def start_polling(self) -> None:
        """Release jobs periodically in a thread, until this process ends."""

        def poll() -> None:
            while True:
                self.release_ready()
                time.sleep(_POLL_INTERVAL_S)

        threading.Thread(target=poll, daemon=True).start()


def has_checkpoint(run_dir: Path, step: int) -> bool:
    """Return True if a run has a complete checkpoint of a step, or its weights."""
    from hlat.checkpoint import checkpoint_directory  # numpy is slow to import
    from hlat.checkpoint.checkpoint_manifest import COMMIT_MARKER

    try:
        root = checkpoint_directory.load_checkpoint_root(run_dir)
        name = checkpoint_directory.format_step_name(step)
        paths = [root / directory / name for directory in ("checkpoints", "milestones")]
        return any((path / COMMIT_MARKER).exists() for path in paths)
    except (ConfigError, OSError):  # a store does not answer
        return False
