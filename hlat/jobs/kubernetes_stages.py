"""Stages of a campaign as workloads of Kubernetes.

JobSets cannot depend on each other, so a command creates the stages with finished
dependencies, and the next command, or the same one with wait=true, creates the next stages.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from hlat.config.config_errors import ConfigError, ExitCode
from hlat.config.model_overrides import format_override
from hlat.config.override_keys import merge_overrides
from hlat.jobs.campaign_state import (
    KUBERNETES,
    CampaignLog,
    StageState,
    StageStatus,
)
from hlat.jobs.stage_job import StageJob
from hlat.jobs.submitted_stages import format_launcher_settings, run_job_command

_TIMEOUT_S = 60
_ACTIVE = (StageState.submitted, StageState.running)
_EXIT_CODES = {
    "Completed": ExitCode.FINISHED,  # JobSet
    "Succeeded": ExitCode.FINISHED,  # PyTorchJob
    "Failed": ExitCode.FAILED,
}
"""Exit code of a stage by the type of a true condition of its workload."""


class KubernetesStages:
    """Creation of the workloads of a campaign; `overrides` are those of the command line."""

    def __init__(self, log: CampaignLog, overrides: Sequence[str]) -> None:
        self._log, self._overrides = log, [*overrides]

    def submit(self, jobs: Sequence[StageJob], statuses: Mapping[str, StageStatus]) -> int:
        """Create the jobs that are ready or have failed; return the exit code of a failure."""
        for job in jobs:
            done = all(statuses[name].state is StageState.finished for name in job.after)
            if not done or statuses[job.name].state in (*_ACTIVE, StageState.finished):
                continue
            if (code := self._submit_job(job)) != ExitCode.FINISHED:
                return code
        return ExitCode.FINISHED

    def record_ends(self, jobs: Sequence[StageJob]) -> None:
        """Log the workloads that have ended, since Kubernetes may delete them.

        Raises:
            ConfigError: The cluster does not answer.
        """
        rows, names = self._log.load_last_rows(), {job.name for job in jobs}
        for name, given in rows.items():
            if name in names and given[0]["launcher"] == KUBERNETES and len(given) == 1:
                code = find_exit_code(Path(given[0]["manifests"]))
                if code is not None:
                    self._log.append("end", name, exit=int(code))

    def _submit_job(self, job: StageJob) -> int:
        base = self._log.campaign_dir / KUBERNETES / job.name
        manifests = next(base / str(n) for n in count(1) if not (base / str(n)).exists())
        _delete_objects(base)
        settings = job.launcher.get(KUBERNETES, {})
        arguments = merge_overrides(format_launcher_settings(settings), self._overrides)
        directory = format_override("hydra.sweep.dir", str(manifests))
        arguments = merge_overrides(arguments, [directory])
        done = run_job_command(job, arguments)
        if done.returncode != ExitCode.FINISHED:
            print(f"{job.name} was not created:\n{done.stderr.rstrip()}", file=sys.stderr)
            return done.returncode
        details = {"manifests": str(manifests), "overrides": self._overrides, "settings": settings}
        self._log.append("submit", job.name, digest=job.digest, launcher=KUBERNETES, **details)
        print(done.stdout.rstrip(), flush=True)
        return ExitCode.FINISHED


def find_exit_code(manifests: Path) -> ExitCode | None:
    """Return how the workload of a manifest has ended; None if it has not.

    Raises:
        ConfigError: The cluster does not answer, or does not have the workload.
    """
    if shutil.which("kubectl") is None:
        return None
    for file in manifests.glob("*/manifest.yaml"):
        for item in _get_objects(file):
            for condition in item.get("status", {}).get("conditions", []):
                if condition.get("status") == "True" and condition.get("type") in _EXIT_CODES:
                    return _EXIT_CODES[condition["type"]]
    return None


def _get_objects(file: Path) -> list[dict[str, Any]]:
    command = ["kubectl", "get", "-f", str(file), "-o", "json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"kubectl has not answered for {_TIMEOUT_S} seconds") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigError(f"kubectl get -f {file}: {lines[-1]}")
    content = json.loads(done.stdout)
    items = content.get("items", [content])
    return [item for item in items if isinstance(item, dict)]


def _delete_objects(base: Path) -> None:
    """Delete the workloads of earlier submissions of a stage, which have the same names."""
    if shutil.which("kubectl") is not None:
        for file in sorted(base.glob("*/*/manifest.yaml")):
            command = ["kubectl", "delete", "--ignore-not-found", "-f", str(file)]
            subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
