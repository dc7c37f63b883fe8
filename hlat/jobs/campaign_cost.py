"""Nodes, hours and price of the stages of a campaign, from the planner, before it starts."""

from collections import Counter
from dataclasses import dataclass

from hlat.config.config_errors import ConfigError
from hlat.config.run import Config
from hlat.config.run_steps import compute_total_steps
from hlat.jobs.campaign_file import CampaignStage
from hlat.jobs.stage_checkpoints import get_start_step
from hlat.jobs.stage_expansion import ExpandedCampaign
from hlat.plan import step_time


@dataclass(frozen=True)
class StageCost:
    """Cost of the jobs of a stage without failures; None where the planner has no prediction.

    `num_nodes` is that of each job, `hours` the sum over all jobs.
    """

    stage: str
    kind: str
    after: tuple[str, ...]
    num_jobs: int
    num_nodes: int
    instance_type: str
    num_steps: int | None
    hours: float | None
    price_usd: float | None


def compute_costs(expanded: ExpandedCampaign) -> list[StageCost]:
    """Return the cost of each stage in topological order."""
    num_jobs = Counter(job.stage for job in expanded.jobs)
    return [
        _compute_cost(expanded, stage, num_jobs[stage.name]) for stage in expanded.campaign.stages
    ]


def sum_known(values: list[float | None]) -> float | None:
    """Return the sum of the known values; None if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _compute_cost(expanded: ExpandedCampaign, stage: CampaignStage, num_jobs: int) -> StageCost:
    config = expanded.configs.get(stage.name)
    num_steps = hours = None
    if stage.kind == "train":
        assert config is not None
        num_steps = compute_total_steps(config) - get_start_step(config)
        hours = _predict_hours(config, num_steps)
    if stage.hours is not None:
        hours = stage.hours * num_jobs
    price = None
    if config is not None and hours is not None:
        hourly = config.hardware.price_usd_per_hour
        price = None if hourly is None else hours * config.hardware.nodes * hourly
    return StageCost(
        stage.name,
        stage.kind,
        stage.dependencies,
        num_jobs,
        1 if config is None else config.hardware.nodes,
        "" if config is None else config.hardware.name,
        num_steps,
        hours,
        price,
    )


def _predict_hours(config: Config, num_steps: int) -> float | None:
    try:
        return num_steps * step_time.predict_step_time(config).total / 3600
    except ConfigError:  # hardware unknown to the planner
        return None
