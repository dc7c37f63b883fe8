"""Execution of a campaign with the launcher of its last command or of this one."""

import importlib.util
import time
from collections.abc import Mapping, Sequence

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
from hlat.jobs.submitted_stages import SlurmStages

_WAIT_INTERVAL_S = 15.0
_STUCK_REASONS = (NEVER_SATISFIED, HELD_BY_USER)
"""Reasons of pending jobs that cannot start while no other job of the campaign runs."""


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
