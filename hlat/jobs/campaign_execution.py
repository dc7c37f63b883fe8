"""Execution of a campaign with the launcher of its last command or of this one."""

import difflib
import importlib.util
import time
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

from hlat.checkpoint.checkpoint_directory import format_step_name
from hlat.config.compose import LOCAL_LAUNCHERS, compose_config
from hlat.config.config_errors import ConfigError, ExitCode, raise_config_errors
from hlat.evaluate.lm_eval_tasks import TaskLoader, validate_harness_installed
from hlat.evaluate.paper_tasks import OWN_TASKS
from hlat.jobs.campaign_file import Campaign
from hlat.jobs.campaign_state import (
    KUBERNETES,
    SLURM,
    CampaignLog,
    StageState,
    StageStatus,
    load_statuses,
)
from hlat.jobs.kubernetes_stages import KubernetesStages
from hlat.jobs.local_stages import LocalStages, validate_no_submitted
from hlat.jobs.slurm_commands import HELD_BY_USER, NEVER_SATISFIED
from hlat.jobs.stage_expansion import ExpandedCampaign
from hlat.jobs.stage_job import StageJob, find_dependents
from hlat.jobs.submitted_stages import SlurmStages

_WAIT_INTERVAL_S = 15.0
_STUCK_REASONS = (NEVER_SATISFIED, HELD_BY_USER)
"""Reasons of pending jobs that cannot start while no other job of the campaign runs."""
_REPLACED_DIR = "replaced"
_ACTIVE = (StageState.running, StageState.submitted)


class CampaignExecution:
    """Start of the jobs of a campaign that have not started.

    Args:
        expanded: The campaign.
        log: Its log, locked by this process.
        overrides: Launcher and its settings; empty: those of the last command.

    Raises:
        ConfigError: The launcher, or its setting dry_run, does not run campaigns.
    """

    def __init__(
        self, expanded: ExpandedCampaign, log: CampaignLog, overrides: Sequence[str]
    ) -> None:
        self._expanded, self._log = expanded, log
        self._overrides = overrides or log.load_overrides()
        composed = compose_config(self._overrides, return_hydra_config=True)
        self._launcher = composed.hydra.runtime.choices["hydra/launcher"]
        if self._launcher not in (*LOCAL_LAUNCHERS, SLURM, KUBERNETES):
            raise ConfigError(
                f"hydra/launcher={self._launcher} does not run campaigns; use local, slurm or "
                "kubernetes"
            )
        if composed.hydra.launcher.get("dry_run"):
            raise ConfigError(
                "hydra.launcher.dry_run=true submits no job, and later stages wait for the jobs of "
                f"earlier ones; use hlat campaign {expanded.campaign.name} dry_run=true"
            )

    def start(self) -> int:
        """Run the jobs on this machine or submit them; return the exit code."""
        is_local, jobs = self._launcher in LOCAL_LAUNCHERS, self._expanded.jobs
        if self._launcher != KUBERNETES:  # only the pods see the data sets
            validate_tasks(self._expanded.campaign, is_local)
        if self._launcher == KUBERNETES:
            return self._create_workloads(retry=True)
        statuses = load_statuses(self._log, jobs, False)
        if not is_local:
            return SlurmStages(self._log, self._overrides).submit(jobs, statuses)
        validate_no_submitted(jobs, statuses)
        return LocalStages(self._log).run(jobs, statuses)

    def wait(self) -> int:
        """Wait until no job can continue; return FAILED unless all have finished.

        On Kubernetes, create the workloads of stages that become ready.
        """
        while True:
            if self._launcher == KUBERNETES and (code := self._create_workloads(retry=False)):
                return code
            statuses = load_statuses(self._log, self._expanded.jobs, False)
            if not can_continue(statuses):
                break
            time.sleep(_WAIT_INTERVAL_S)
        is_complete = all(s.state is StageState.finished for s in statuses.values())
        return ExitCode.FINISHED if is_complete else ExitCode.FAILED

    def _create_workloads(self, retry: bool) -> int:
        stages = KubernetesStages(self._log, self._overrides)
        stages.record_ends(self._expanded.jobs)
        statuses = load_statuses(self._log, self._expanded.jobs, False)
        ended = (StageState.failed, StageState.interrupted)
        jobs = [
            job for job in self._expanded.jobs if retry or statuses[job.name].state not in ended
        ]
        return stages.submit(jobs, statuses)


def can_continue(statuses: Mapping[str, StageStatus]) -> bool:
    """Return True if a job runs, or a submitted job can start without another command."""
    return any(
        status.state is StageState.running
        or (
            status.state is StageState.submitted
            and not any(reason in status.detail for reason in _STUCK_REASONS)
        )
        for status in statuses.values()
    )


def validate_tasks(campaign: Campaign, is_local: bool) -> None:
    """Raise ConfigError if an evaluation has an unknown task, or no directory of data sets.

    Names of tasks are validated where lm-evaluation-harness is installed; with `is_local`, it must
    be.
    """
    problems: list[str] = []
    for stage in campaign.stages:
        names = [name for name in stage.tasks if name not in OWN_TASKS]
        if not names:
            continue
        try:
            if is_local:
                validate_harness_installed()
            is_installed = importlib.util.find_spec("lm_eval") is not None
            loader = TaskLoader(campaign.find_data(stage))
            loader.resolve_tasks(names if is_installed else [], stage.shots)
        except ConfigError as error:
            problems += [f"stages.{stage.name}: {problem}" for problem in error.problems]
    raise_config_errors(problems)


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
    raise_config_errors(
        f"{job.name} is {statuses[job.name].state.value}; cancel it first: "
        f"hlat jobs cancel {job.directory}"
        for job in affected
        if statuses[job.name].state in _ACTIVE
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
