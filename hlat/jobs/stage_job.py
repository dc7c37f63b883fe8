"""Jobs of a campaign: one per stage, and one per checkpoint of an evaluation with several.

A job is a command of hlat. It does not depend on the place where it runs, and is plain data, so
that the directory of a campaign contains its graph.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hlat.config.config_errors import ConfigError
from hlat.storage.durable_files import replace_file
from hlat.tracking.run_directory import CAMPAIGN_FILE


@dataclass(frozen=True)
class StageJob:
    """A job of a stage.

    Attributes:
        name: Name of the stage, with `@<step>` for a checkpoint.
        after: Names of the jobs that must finish first.
        arguments: Arguments of the command `hlat <kind>`.
        launcher: Settings of `hydra.launcher` by launcher.
        directory: Directory of the run, evaluation or command, with the submissions of its jobs.
        result: Path that exists after the job has finished.
        step: Checkpoint that is sufficient to start, before the run that saves it has finished.
        digest: Digest of everything that determines the result (`compute_digest`).
        detail: Description for tables.
    """

    name: str
    stage: str
    kind: str
    after: tuple[str, ...]
    arguments: tuple[str, ...]
    launcher: dict[str, Any]
    directory: str
    result: str
    step: int | None = None
    digest: str = ""
    detail: str = ""

    @property
    def module(self) -> str:
        """Python module of the command."""
        return f"hlat.{self.kind}"


def compute_digest(arguments: Sequence[str], config: str = "") -> str:
    """Return a digest of the arguments and the composed configuration of a job."""
    key = json.dumps([*arguments, config])
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def save_jobs(campaign_dir: Path, jobs: Sequence[StageJob]) -> None:
    """Write the jobs of a campaign atomically."""
    rows = [*map(asdict, jobs)]
    replace_file(campaign_dir / CAMPAIGN_FILE, (json.dumps(rows, indent=1) + "\n").encode())


def load_jobs(campaign_dir: Path) -> list[StageJob]:
    """Return the jobs that `save_jobs` has written.

    Raises:
        ConfigError: The file is missing or invalid.
    """
    try:
        rows = json.loads((campaign_dir / CAMPAIGN_FILE).read_text())
        return [_parse_job(row) for row in rows]
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{campaign_dir} is not the directory of a campaign") from error


def is_campaign_dir(directory: Path) -> bool:
    """Return True if a campaign was started in the directory."""
    return (directory / CAMPAIGN_FILE).is_file()


def find_dependents(jobs: Sequence[StageJob], names: set[str]) -> set[str]:
    """Return the names of all jobs that depend on some jobs, directly or not; `jobs` are sorted."""
    found: set[str] = set()
    for job in jobs:
        if not (found.isdisjoint(job.after) and names.isdisjoint(job.after)):
            found.add(job.name)
    return found


def _parse_job(row: Mapping[str, Any]) -> StageJob:
    return StageJob(**{**row, "after": tuple(row["after"]), "arguments": tuple(row["arguments"])})
