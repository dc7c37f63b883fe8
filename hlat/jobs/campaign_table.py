"""Tables of a campaign for the terminal, and the same content as JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from hlat.jobs.campaign_cost import StageCost, sum_known
from hlat.jobs.campaign_state import StageStatus
from hlat.jobs.stage_job import StageJob
from hlat.tracking.text_format import UNKNOWN, format_count, format_table, format_usd

_STATUS_HEADINGS = ("stage", "state", "job", "after", "detail")
_COST_HEADINGS = ("stage", "kind", "after", "jobs", "nodes", "steps", "hours", "price")
_MAX_INDENTATION = 16
"""Depth from which jobs are not indented further; a chain would have lines of its length."""


def format_statuses(jobs: Sequence[StageJob], statuses: Mapping[str, StageStatus]) -> list[str]:
    """Return the lines of the table of jobs, indented by their depth in the graph."""
    depths: dict[str, int] = {}
    rows = []
    for job in jobs:
        depths[job.name] = max((depths[name] + 1 for name in job.after), default=0)
        status = statuses[job.name]
        state = status.state.value + " (settings changed)" * status.is_changed
        detail = status.detail or job.detail
        rows.append(
            (
                f"{'  ' * min(depths[job.name], _MAX_INDENTATION)}{job.name}",
                state,
                status.job_id,
                format_after(job),
                detail,
            )
        )
    return format_table(_STATUS_HEADINGS, rows)


def format_after(job: StageJob) -> str:
    """Return the stages that must finish before a job, at most two by name."""
    stages = list(dict.fromkeys(name.partition("@")[0] for name in job.after))
    return ", ".join(stages[:2]) + f" and {len(stages) - 2} more" * (len(stages) > 2)


def summarize_statuses(
    jobs: Sequence[StageJob], statuses: Mapping[str, StageStatus]
) -> list[dict[str, Any]]:
    """Return the table of jobs as JSON."""
    return [
        {
            "name": job.name,
            "stage": job.stage,
            "kind": job.kind,
            "after": [*job.after],
            "state": statuses[job.name].state.value,
            "changed": statuses[job.name].is_changed,
            "job": statuses[job.name].job_id,
            "detail": statuses[job.name].detail,
            "command": ["hlat", job.kind, *job.arguments],
            "directory": job.directory,
        }
        for job in jobs
    ]


def format_costs(costs: Sequence[StageCost]) -> list[str]:
    """Return the lines of the table of costs with their sum."""
    rows = [
        (
            cost.stage,
            cost.kind,
            ", ".join(cost.after[:3]) + ", ..." * (len(cost.after) > 3),
            str(cost.num_jobs),
            f"{cost.num_nodes} {cost.instance_type}".rstrip(),
            "" if cost.num_steps is None else format_count(cost.num_steps),
            _format_hours(cost.hours),
            format_usd(cost.price_usd),
        )
        for cost in costs
    ]
    hours, price = (sum_known([getattr(c, key) for c in costs]) for key in ("hours", "price_usd"))
    num_jobs = str(sum(cost.num_jobs for cost in costs))
    rows.append(("total", "", "", num_jobs, "", "", _format_hours(hours), format_usd(price)))
    lines = format_table(_COST_HEADINGS, rows)
    missing = [cost.stage for cost in costs if cost.hours is None]
    if missing:
        lines.append(
            f"without {', '.join(missing)}: the planner predicts training on known hardware; give "
            "the hours of a job of these stages as hours: in the file"
        )
    return lines


def summarize_costs(costs: Sequence[StageCost]) -> list[dict[str, Any]]:
    """Return the table of costs as JSON."""
    return [{**vars(cost), "after": [*cost.after]} for cost in costs]


def _format_hours(hours: float | None) -> str:
    return UNKNOWN if hours is None else f"{hours:,.1f}"
