"""Stages of a campaign as jobs of a launcher.

Each job is submitted by its command with the launcher's overrides, as a user would type it. The log
has a row before each submission, so that a killed command does not submit a job twice.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from hlat.config.config_errors import ExitCode
from hlat.config.entry_point import build_module_command, get_user_environment
from hlat.config.model_overrides import format_override
from hlat.config.override_keys import merge_overrides
from hlat.jobs import slurm_commands
from hlat.jobs.campaign_state import (
    SLURM,
    CampaignLog,
    StageState,
    StageStatus,
    load_submitted_rows,
)
from hlat.jobs.stage_job import StageJob
from hlat.jobs.submission import find_latest_submission

_DICTIONARY_KEYS = ("options", "srun_options")
"""Settings of the Slurm launcher with keys of the user."""


class StageAction(Enum):
    """Action for a job when the command of its campaign is repeated."""

    keep = "keep"
    """The job is finished, running, or submitted with the present settings."""
    start = "start"
    """The job has not started, was interrupted or has failed."""
    replace = "replace"
    """The submitted job is cancelled and submitted again: its settings or dependencies changed, or
    Slurm has recorded a failure of a dependency that has finished."""


def decide_actions(
    jobs: Sequence[StageJob], statuses: Mapping[str, StageStatus]
) -> dict[str, StageAction]:
    """Return the action of each job by name; `jobs` are in topological order."""
    actions: dict[str, StageAction] = {}
    for job in jobs:
        status = statuses[job.name]
        if status.state.has_started:
            actions[job.name] = StageAction.keep
        elif status.state is StageState.submitted:
            is_stale = any(actions[name] is not StageAction.keep for name in job.after)
            is_ready = all(statuses[name].state is StageState.finished for name in job.after)
            is_stuck = is_ready and slurm_commands.NEVER_SATISFIED in status.detail
            is_replaced = status.is_changed or is_stale or is_stuck
            actions[job.name] = StageAction.replace if is_replaced else StageAction.keep
        else:
            actions[job.name] = StageAction.start
    return actions


class SlurmStages:
    """Submission of the jobs of a campaign to Slurm.

    `overrides` select the launcher and its settings for all jobs; they precede those of the file.
    """

    def __init__(self, log: CampaignLog, overrides: Sequence[str]) -> None:
        self._log, self._overrides = log, [*overrides]

    def submit(self, jobs: Sequence[StageJob], statuses: Mapping[str, StageStatus]) -> int:
        """Submit, replace and cancel jobs; return the exit code of the first that fails."""
        actions = decide_actions(jobs, statuses)
        self._cancel_removed(jobs)
        replaced = [job for job in jobs if actions[job.name] is StageAction.replace]
        if replaced:
            slurm_commands.cancel_jobs([statuses[job.name].job_id for job in replaced])
        for job in replaced:
            print(f"cancelled job {statuses[job.name].job_id} of {job.name}, to submit it again")
            self._log.append("reset", job.name)
        by_name = {job.name: job for job in jobs}
        for job in jobs:
            if actions[job.name] is StageAction.keep:
                continue
            unfinished = [
                by_name[name].directory
                for name in job.after
                if statuses[name].state is not StageState.finished
            ]
            code = self._submit_job(job, unfinished)
            if code != ExitCode.FINISHED:
                return code
        return ExitCode.FINISHED

    def _submit_job(self, job: StageJob, after: Sequence[str]) -> int:
        settings = job.launcher.get(SLURM, {})
        arguments = merge_overrides(format_launcher_settings(settings), self._overrides)
        if after:  # which start after those of the command line
            word = format_override("hydra.launcher.after", [*dict.fromkeys(after)])
            arguments = merge_overrides(arguments, [word])
        details = {"directory": job.directory, "overrides": self._overrides, "settings": settings}
        self._log.append("submit", job.name, digest=job.digest, launcher=SLURM, **details)
        done = run_job_command(job, arguments)
        if done.returncode == ExitCode.FINISHED:
            submission = find_latest_submission(Path(job.directory))
            job_id = submission.last_job_id if submission is not None else None
            waits = f" after {len(after)} others" if len(after) > 1 else " after 1" if after else ""
            print(f"submitted {job.name} as job {job_id}{waits}", flush=True)
        else:
            self._log.append("reset", job.name)
            print(f"{job.name} was not submitted:\n{done.stderr.rstrip()}", file=sys.stderr)
        return done.returncode

    def _cancel_removed(self, jobs: Sequence[StageJob]) -> None:
        """Cancel the pending jobs of stages that the file no longer has."""
        names = {job.name for job in jobs}
        rows = {
            name: given
            for name, given in self._log.load_last_rows().items()
            if name not in names and given[0]["launcher"] == SLURM
        }
        removed = [
            StageJob(name, name, "", (), (), {}, given[0]["directory"], "")
            for name, given in rows.items()
        ]
        for name, job_row in load_submitted_rows(removed, rows).items():
            if job_row.state == "PENDING":
                slurm_commands.cancel_jobs(job_row.active_job_ids)
                print(f"cancelled job {job_row.job_id} of {name}, which the file does not contain")
                self._log.append("reset", name)
            elif job_row.is_active:
                print(f"{name} is not in the file; its job {job_row.job_id} is {job_row.state}")


def format_launcher_settings(settings: Mapping[str, Any]) -> list[str]:
    """Return the overrides of `hydra.launcher` for settings of a campaign file."""
    arguments = []
    for key, value in settings.items():
        name = f"hydra.launcher.{key}"
        if key in _DICTIONARY_KEYS and isinstance(value, dict):
            arguments += [
                format_override(f"+{name}.{option}", item) for option, item in value.items()
            ]
        else:
            arguments.append(format_override(name, value))
    return arguments


def run_job_command(job: StageJob, overrides: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    """Run the command of a job with overrides and the user's environment; return its output."""
    command = [*build_module_command(sys.executable, job.module), *job.arguments, *overrides]
    return subprocess.run(command, env=get_user_environment(), capture_output=True, text=True)
