"""Repetition of finished stages: their results are moved away, together with dependent ones."""

import difflib
from collections.abc import Mapping
from itertools import count
from pathlib import Path

from hlat.checkpoint.checkpoint_directory import format_step_name
from hlat.config.config_errors import ConfigError
from hlat.jobs.campaign_state import CampaignLog, StageState, StageStatus
from hlat.jobs.stage_expansion import ExpandedCampaign
from hlat.jobs.stage_job import StageJob, find_dependents

_REPLACED_DIR = "replaced"
_ACTIVE = (StageState.running, StageState.submitted)


def reset_stage(
    expanded: ExpandedCampaign,
    statuses: Mapping[str, StageStatus],
    log: CampaignLog,
    name: str,
) -> None:
    """Move the results of a stage or job, and of those that depend on it, to `replaced/`.

    Raises:
        ConfigError: There is no such stage, or one of the jobs is active.
    """
    jobs = expanded.jobs
    chosen = {job.name for job in jobs if name in (job.name, job.stage)}
    if not chosen:
        names = [*dict.fromkeys(name for job in jobs for name in (job.stage, job.name))]
        near = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
        raise ConfigError(f"repeat={name} is not a stage; {hint}")
    chosen |= find_dependents(jobs, chosen)
    affected = [job for job in jobs if job.name in chosen]
    if active := [job for job in affected if statuses[job.name].state in _ACTIVE]:
        raise ConfigError(
            *(
                f"{job.name} is {statuses[job.name].state.value}; cancel it first: "
                f"hlat jobs cancel {job.directory}"
                for job in active
            )
        )
    for job in affected:
        for path in _list_results(expanded, job):
            if path.exists():
                replaced_dir = expanded.directory / _REPLACED_DIR
                replaced_dir.mkdir(exist_ok=True)
                targets = (replaced_dir / f"{path.name}.{number}" for number in count(1))
                target = next(unused for unused in targets if not unused.exists())
                path.rename(target)
                print(f"moved {path} to {target}")
        log.append("reset", job.name)


def _list_results(expanded: ExpandedCampaign, job: StageJob) -> list[Path]:
    """Return the paths that would skip or change the repeated job if they existed."""
    if job.kind in ("train", "average"):
        return [Path(job.result)]
    if job.kind == "report":
        return []
    model = Path(job.arguments[0])
    names = [model.name]
    if job.step is not None:
        names = [format_step_name(job.step)]
    elif (model / "checkpoints").is_dir():
        names = [path.name for path in (model / "checkpoints").iterdir()]
    return [Path(job.result) / f"{name}.json" for name in names]
