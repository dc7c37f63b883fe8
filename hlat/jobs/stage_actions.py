"""Decision about each job of a campaign when its command is repeated, as a pure function."""

from collections.abc import Mapping, Sequence
from enum import Enum

from hlat.jobs.campaign_state import StageState, StageStatus
from hlat.jobs.slurm_commands import NEVER_SATISFIED
from hlat.jobs.stage_job import StageJob


class StageAction(Enum):
    """Action for a job."""

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
            is_stuck = is_ready and NEVER_SATISFIED in status.detail
            is_replaced = status.is_changed or is_stale or is_stuck
            actions[job.name] = StageAction.replace if is_replaced else StageAction.keep
        else:
            actions[job.name] = StageAction.start
    return actions


def find_unchangeable(
    jobs: Sequence[StageJob], statuses: Mapping[str, StageStatus]
) -> list[StageJob]:
    """Return the finished and running jobs with settings that changed after their start."""
    return [
        job
        for job in jobs
        if statuses[job.name].is_changed and statuses[job.name].state.has_started
    ]
