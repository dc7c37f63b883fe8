"""Page of a campaign from the files in its directory."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hlat.config.config_errors import ConfigError
from hlat.evaluate.evaluation_results import format_paper_tables, load_evaluated_models
from hlat.jobs.campaign_page import GraphNode, write_campaign_page
from hlat.jobs.campaign_state import CampaignLog, StageState, StageStatus, load_statuses
from hlat.jobs.campaign_table import format_after, format_statuses
from hlat.jobs.stage_job import StageJob, load_jobs
from hlat.tracking.text_format import format_timestamp

_STATE_ORDER = (
    *(StageState.failed, StageState.interrupted, StageState.running, StageState.submitted),
    *(StageState.ready, StageState.waiting, StageState.finished),
)
"""The state of a stage with several jobs is the first of these that a job has."""


def write_campaign_report(campaign_dir: Path, is_running: bool | None = None) -> list[str]:
    """Write the page of a campaign; return the table of its jobs and the path of the page.

    `is_running` is True while a command runs stages on this machine; None: if one has the lock.

    Raises:
        ConfigError: No campaign was started in the directory.
    """
    jobs, log = load_jobs(campaign_dir), CampaignLog(campaign_dir)
    statuses = load_statuses(log, jobs, log.is_locked if is_running is None else is_running)
    runs = [job.stage for job in jobs if job.kind == "train"]
    models = []
    for run in runs:
        with suppress(ConfigError):  # no scores yet
            models += load_evaluated_models(campaign_dir / run)
    page = write_campaign_page(
        campaign_dir,
        build_nodes(jobs, statuses),
        [_build_row(job, statuses[job.name]) for job in jobs],
        [run for run in runs if (campaign_dir / run / "report.html").exists()],
        format_paper_tables(models) if models else [],
    )
    return [*format_statuses(jobs, statuses), str(page)]


def build_nodes(jobs: Sequence[StageJob], statuses: Mapping[str, StageStatus]) -> list[GraphNode]:
    """Return a node of the graph for each stage."""
    nodes = []
    for stage in dict.fromkeys(job.stage for job in jobs):
        members = [job for job in jobs if job.stage == stage]
        states = [statuses[job.name].state for job in members]
        state = next(candidate for candidate in _STATE_ORDER if candidate in states)
        detail = members[0].detail
        if len(members) > 1:
            num_finished = states.count(StageState.finished)
            detail = f"{num_finished} of {len(members)} jobs finished"
        after = dict.fromkeys(name.partition("@")[0] for job in members for name in job.after)
        nodes.append(GraphNode(stage, members[0].kind, state.value, detail, tuple(after)))
    return nodes


def _build_row(job: StageJob, status: StageStatus) -> tuple[str, ...]:
    times = (status.start_time, status.end_time)
    return (
        job.name,
        status.state.value + " (settings changed)" * status.is_changed,
        status.job_id,
        format_after(job),
        *("" if time is None else format_timestamp(time) for time in times),
        status.detail or job.detail,
    )
