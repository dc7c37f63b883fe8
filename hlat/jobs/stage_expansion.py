"""Expansion of the stages of a campaign to jobs, with the configuration of every run validated.

A stage of kind train, average or report is one job. An evaluation has one job for each checkpoint
that it selects: with `scores: {evaluate: first, steps: [20, 40], tasks: [piqa]}`, the jobs are
scores@20 and scores@40. Its configuration follows from that of the run that writes the checkpoint,
which may not exist yet. The problems of all stages are reported at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hlat.config.command_job import build_job_dir
from hlat.config.compose import compose_config
from hlat.config.config_errors import ConfigError, raise_config_errors
from hlat.config.frozen_config import format_config
from hlat.config.model_overrides import format_override
from hlat.config.override_keys import merge_overrides, parse_override_key
from hlat.config.resolve import resolve_config
from hlat.config.run import Config
from hlat.config.run_steps import compute_total_steps
from hlat.evaluate.eval_request import EvalRequest
from hlat.evaluate.humaneval import HumanEvalSettings
from hlat.evaluate.paper_tasks import HUMANEVAL
from hlat.inference.inference_config import build_inference_config
from hlat.inference.model_metadata import ModelMetadata
from hlat.jobs.campaign_file import Campaign, CampaignStage
from hlat.jobs.campaign_page import PAGE_NAME
from hlat.jobs.stage_checkpoints import (
    build_checkpoint_path,
    select_start,
    select_steps,
    validate_continues,
    validate_last,
    validate_retention,
)
from hlat.jobs.stage_job import StageJob, compute_digest
from hlat.plan.feasibility import validate_feasibility
from hlat.tracking.run_directory import EVALUATIONS_DIR

_RUN_DIR_KEYS, _START_KEY = ("run.root", "run.name"), "checkpoint.start_from"
"""Keys of runs that the campaign sets."""
_SHOWN_TASKS = 3
"""Number of tasks in the description of an evaluation."""


@dataclass(frozen=True)
class ExpandedCampaign:
    """The jobs of a campaign in topological order, and the configurations of its stages."""

    campaign: Campaign
    jobs: tuple[StageJob, ...]
    configs: dict[str, Config]
    """Configuration of a run, or of the engine of an evaluation, by stage."""

    @property
    def directory(self) -> Path:
        """Directory of the campaign."""
        return self.campaign.directory


def expand_campaign(campaign: Campaign) -> ExpandedCampaign:
    """Return the jobs of a campaign.

    Raises:
        ConfigError: The problems of all stages, each after the name of its stage.
    """
    expander = _StageExpander(campaign)
    problems: list[str] = []
    for stage in campaign.stages:
        if any(name in expander.invalid for name in stage.dependencies):
            expander.invalid.add(stage.name)  # the cause is reported
            continue
        try:
            expander.add_stage(stage)
        except ConfigError as error:
            expander.invalid.add(stage.name)
            problems += [f"stages.{stage.name}: {problem}" for problem in error.problems]
    problems += _find_duplicates(expander.jobs)
    raise_config_errors(problems)
    return ExpandedCampaign(campaign, tuple(expander.jobs), expander.configs)


def _find_duplicates(jobs: Sequence[StageJob]) -> list[str]:
    """Return the stages with a job of the same command as a job of another stage."""
    first: dict[str, StageJob] = {}
    same = [(job, first.setdefault(job.directory, job)) for job in jobs]
    return [
        f"stages.{job.stage}: {job.name} is the same command as {other.name}; remove one of them"
        for job, other in same
        if job is not other
    ]


class _StageExpander:
    """Jobs and configurations of the stages so far."""

    def __init__(self, campaign: Campaign) -> None:
        self._campaign = campaign
        self._positions = {stage.name: i for i, stage in enumerate(campaign.stages)}
        self.jobs: list[StageJob] = []
        self.configs: dict[str, Config] = {}
        self.invalid: set[str] = set()
        self._names_by_stage: dict[str, list[str]] = {}
        self._dependencies: tuple[str, ...] = ()
        """Jobs that finish before those of the stage that is being added."""

    def add_stage(self, stage: CampaignStage) -> None:
        """Add the jobs of a stage after those of its dependencies."""
        build_jobs: dict[str, Callable[[CampaignStage], list[StageJob]]] = {
            "train": self._build_training,
            "average": self._build_average,
            "evaluate": self._build_evaluations,
            "report": self._build_report,
        }
        self._dependencies = self._list_dependencies(stage)
        jobs = build_jobs[stage.kind](stage)
        self._names_by_stage[stage.name] = [job.name for job in jobs]
        self.jobs += jobs

    def _build_training(self, stage: CampaignStage) -> list[StageJob]:
        run_dir = self._get_run_dir(stage.name)
        overrides = merge_overrides(self._campaign.train, stage.overrides)
        _validate_train_overrides(stage, overrides)
        arguments = [
            *overrides,
            format_override("run.root", str(run_dir.parent)),
            format_override("run.name", run_dir.name),
        ]
        source = stage.start_from
        if source is not None:
            before = self.configs[source]
            start = select_start(stage, before)
            path = build_checkpoint_path(source, self._get_run_dir(source), before, start)
            arguments.append(format_override(_START_KEY, path))
        composed = compose_config(arguments)
        config = self.configs[stage.name] = resolve_config(composed)
        validate_feasibility(config)
        detail = f"to step {compute_total_steps(config):,} of {config.model.name}"
        if source is not None:
            validate_continues(source, before, start, config)
            detail = f"from step {start:,} of {source} {detail}"
        yaml = format_config(composed)
        return [self._build_job(stage, arguments, run_dir, run_dir, config=yaml, detail=detail)]

    def _build_average(self, stage: CampaignStage) -> list[StageJob]:
        source = stage.sources[0]
        run_dir, config = self._get_run_dir(source), self.configs[source]
        if stage.last is None:
            steps = select_steps(stage, config)
            validate_retention(steps, source, config)
            selection = f"steps={','.join(map(str, steps))}"
            detail = f"steps {', '.join(f'{step:,}' for step in steps)} of {source}"
        else:
            validate_last(stage.last, source, config)
            selection, detail = f"last={stage.last}", f"last {stage.last} checkpoints of {source}"
        output = run_dir / "averages" / stage.name
        arguments = [str(run_dir), selection, f"output={output}"]
        directory = build_job_dir(run_dir, "average", arguments)
        return [self._build_job(stage, arguments, directory, output, detail=detail)]

    def _build_evaluations(self, stage: CampaignStage) -> list[StageJob]:
        """Return a job for each selected checkpoint, or for the newest one."""
        source = self._campaign.get_stage(stage.sources[0])
        is_average = source.kind == "average"
        run_stage = source.sources[0] if is_average else source.name
        run_dir, run_config = self._get_run_dir(run_stage), self.configs[run_stage]
        model = run_dir / "averages" / source.name if is_average else run_dir
        overrides = merge_overrides(self._campaign.evaluate, stage.overrides)
        self.configs[stage.name] = _build_evaluation_config(run_dir, run_config, overrides)
        has_selection = any((stage.steps, stage.tokens, stage.every_tokens))
        steps = select_steps(stage, run_config) if has_selection else []
        validate_retention(steps, run_stage, run_config)
        selected: Sequence[int | None] = steps or [None]
        evaluations_dir, data = run_dir / EVALUATIONS_DIR, self._campaign.find_data(stage)
        tasks = ", ".join(stage.tasks[:_SHOWN_TASKS]) + ", ..." * (len(stage.tasks) > _SHOWN_TASKS)
        jobs = []
        for step in selected:
            request = _build_request(stage, str(model), step, data)
            directory = evaluations_dir / request.build_name()
            arguments = [*_format_request(request), *overrides]
            detail = f"{tasks} {source.name}" + ("" if step is None else f" at step {step:,}")
            jobs.append(
                self._build_job(stage, arguments, directory, evaluations_dir, step, detail=detail)
            )
        return jobs

    def _build_report(self, stage: CampaignStage) -> list[StageJob]:
        directory = self._campaign.directory
        arguments = [str(directory)]
        job_dir = build_job_dir(directory, "report", arguments)
        detail = f"{len(stage.sources)} stages"
        page = directory / PAGE_NAME
        return [self._build_job(stage, arguments, job_dir, page, detail=detail)]

    def _build_job(
        self,
        stage: CampaignStage,
        arguments: Sequence[str],
        directory: Path,
        result: Path,
        step: int | None = None,
        config: str = "",
        detail: str = "",
    ) -> StageJob:
        common = self._campaign.launcher
        launcher = {
            name: {**common.get(name, {}), **stage.launcher.get(name, {})}
            for name in {**common, **stage.launcher}
        }
        return StageJob(
            name=stage.name if step is None else f"{stage.name}@{step}",
            stage=stage.name,
            kind=stage.kind,
            after=self._dependencies,
            arguments=tuple(arguments),
            launcher=launcher,
            directory=str(directory),
            result=str(result),
            step=step,
            digest=compute_digest(arguments, config),
            detail=detail,
        )

    def _list_dependencies(self, stage: CampaignStage) -> tuple[str, ...]:
        """Return the jobs of the dependencies in the order of all jobs."""
        names = sorted(stage.dependencies, key=self._positions.__getitem__)
        return tuple(job for name in names for job in self._names_by_stage[name])

    def _get_run_dir(self, name: str) -> Path:
        return self._campaign.directory / name


def _validate_train_overrides(stage: CampaignStage, overrides: Sequence[str]) -> None:
    """Raise ConfigError for an override of a key that the campaign sets, or of the launcher."""
    for word in overrides:
        key = parse_override_key(word) or ""
        if key in _RUN_DIR_KEYS or (key == _START_KEY and stage.start_from):
            raise ConfigError(f"{word}: the campaign sets {key}; remove it")
        if key.startswith(("hydra.", "hydra/")):
            raise ConfigError(f"{word}: use launcher: for settings of hydra.launcher")


def _build_evaluation_config(run_dir: Path, config: Config, overrides: Sequence[str]) -> Config:
    """Return the configuration of an evaluation of a run that has not started."""
    metadata = ModelMetadata(
        run_dir.absolute(),
        config.model,
        config.batch.sequence_length,
        config.precision.param_dtype,
        tuple(operator.value for operator in config.precision.fp32_operators),
    )
    return build_inference_config(metadata, overrides)


def _build_request(
    stage: CampaignStage, model: str, step: int | None, data: Path | None
) -> EvalRequest:
    """Return the evaluation of a checkpoint; `step` is None for the newest."""
    settings = HumanEvalSettings(
        stage.samples or HumanEvalSettings.num_samples, run_generated_code=stage.run_generated_code
    )
    return EvalRequest(
        model,
        stage.tasks,
        step,
        shots=stage.shots,
        limit=stage.limit,
        data=data,
        humaneval_settings=settings,
    )


def _format_request(request: EvalRequest) -> list[str]:
    """Return the arguments of `hlat evaluate` without overrides of the configuration."""
    humaneval = request.humaneval_settings
    settings = {
        "limit": request.limit,
        "shots": request.shots,
        "data": request.data,
        "samples": humaneval.num_samples if HUMANEVAL in request.tasks else None,
        "run_generated_code": "true" if humaneval.run_generated_code else None,
        "step": request.step,
    }
    arguments = [f"{key}={value}" for key, value in settings.items() if value is not None]
    return [request.source, f"tasks={','.join(request.tasks)}", *arguments]
