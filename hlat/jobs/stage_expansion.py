"""Expansion of the stages of a campaign to jobs, with the configuration of every run validated.

The problems of all stages are reported at once. The configuration of an evaluation follows from
that of the run that writes its checkpoint, which may not exist yet.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hlat.checkpoint.checkpoint_directory import format_step_name, parse_step
from hlat.checkpoint.start_validation import build_last_state, find_start_problems
from hlat.config.command_job import build_job_dir
from hlat.config.compose import compose_config
from hlat.config.config_errors import ConfigError
from hlat.config.frozen_config import format_config
from hlat.config.model_overrides import format_override
from hlat.config.override_keys import merge_overrides, parse_override_key
from hlat.config.resolve import resolve_config
from hlat.config.run import Config
from hlat.config.run_steps import compute_total_steps, is_milestone
from hlat.evaluate.eval_request import EvalRequest
from hlat.evaluate.humaneval import HumanEvalSettings
from hlat.evaluate.paper_tasks import HUMANEVAL
from hlat.inference.inference_config import build_inference_config
from hlat.inference.model_metadata import ModelMetadata
from hlat.jobs.campaign_file import Campaign, CampaignStage
from hlat.jobs.campaign_page import PAGE_NAME
from hlat.jobs.stage_job import StageJob, compute_digest
from hlat.plan.feasibility import validate_feasibility
from hlat.tracking.run_directory import EVALUATIONS_DIR

_CAMPAIGN_KEYS = ("run.root", "run.name", "checkpoint.start_from")
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

    def get_job(self, name: str) -> StageJob:
        """Return a job by name."""
        return next(job for job in self.jobs if job.name == name)


def expand_campaign(campaign: Campaign) -> ExpandedCampaign:
    """Return the jobs of a campaign.

    Raises:
        ConfigError: The problems of all stages, each after the name of its stage.
    """
    expansion = _Expansion(campaign)
    problems: list[str] = []
    for stage in campaign.stages:
        if any(name in expansion.invalid for name in stage.dependencies):
            expansion.invalid.add(stage.name)  # the cause is reported
            continue
        try:
            expansion.add_stage(stage)
        except ConfigError as error:
            expansion.invalid.add(stage.name)
            problems += [f"stages.{stage.name}: {problem}" for problem in error.problems]
    problems += _find_duplicates(expansion.jobs)
    if problems:
        raise ConfigError(*problems)
    return ExpandedCampaign(campaign, tuple(expansion.jobs), expansion.configs)


def _find_duplicates(jobs: Sequence[StageJob]) -> list[str]:
    """Return the stages with a job of the same command as a job of another stage."""
    first: dict[str, StageJob] = {}
    same = [(job, first.setdefault(job.directory, job)) for job in jobs]
    return [
        f"stages.{job.stage}: {job.name} is the same command as {other.name}; remove one of them"
        for job, other in same
        if job is not other
    ]


class _Expansion:
    """Jobs and configurations of the stages so far."""

    def __init__(self, campaign: Campaign) -> None:
        self._campaign = campaign
        self.jobs: list[StageJob] = []
        self.configs: dict[str, Config] = {}
        self.invalid: set[str] = set()

    def add_stage(self, stage: CampaignStage) -> None:
        """Add the jobs of a stage after those of its dependencies."""
        builders: dict[str, Callable[[CampaignStage], list[StageJob]]] = {
            "train": self._build_training,
            "average": self._build_average,
            "evaluate": self._build_evaluations,
            "report": self._build_report,
        }
        self.jobs += builders[stage.kind](stage)

    def _build_training(self, stage: CampaignStage) -> list[StageJob]:
        overrides = merge_overrides(self._campaign.train, stage.overrides)
        for word in overrides:
            key = parse_override_key(word) or ""
            if key in _CAMPAIGN_KEYS[:2] or (key == _CAMPAIGN_KEYS[2] and stage.start_from):
                raise ConfigError(f"{word}: the campaign sets {key}; remove it")
            if key.startswith(("hydra.", "hydra/")):
                raise ConfigError(f"{word}: use launcher: for settings of hydra.launcher")
        run_dir = self._get_run_dir(stage)
        arguments = [
            *overrides,
            format_override("run.root", str(run_dir.parent)),
            format_override("run.name", run_dir.name),
        ]
        if stage.start_from is not None:
            source = self.configs[stage.start_from]
            step_name = format_step_name(compute_total_steps(source))
            path = f"{self._get_run_dir(stage.start_from)}/checkpoints/{step_name}"
            if source.checkpoint.destination is not None:
                root = source.checkpoint.destination.rstrip("/")
                path = f"{root}/{stage.start_from}/checkpoints/{step_name}"
            arguments.append(format_override("checkpoint.start_from", path))
        composed = compose_config(arguments)
        config = self.configs[stage.name] = resolve_config(composed)
        validate_feasibility(config)
        if stage.start_from is not None:
            _validate_continues(stage.start_from, self.configs[stage.start_from], config)
        detail = f"to step {compute_total_steps(config):,} of {config.model.name}"
        yaml = format_config(composed)
        return [self._build_job(stage, arguments, run_dir, run_dir, config=yaml, detail=detail)]

    def _build_average(self, stage: CampaignStage) -> list[StageJob]:
        source = stage.sources[0]
        run_dir, config = self._get_run_dir(source), self.configs[source]
        selection, detail = f"last={stage.last}", f"last {stage.last} checkpoints of {source}"
        if stage.last is None:
            steps = _select_steps(stage, config)
            _validate_retention(steps, source, config)
            selection = f"steps={','.join(map(str, steps))}"
            detail = f"steps {', '.join(f'{step:,}' for step in steps)} of {source}"
        else:
            _validate_last(stage.last, source, config)
        output = run_dir / "averages" / stage.name
        arguments = [str(run_dir), selection, f"output={output}"]
        directory = build_job_dir(run_dir, "average", arguments)
        return [self._build_job(stage, arguments, directory, output, detail=detail)]

    def _build_evaluations(self, stage: CampaignStage) -> list[StageJob]:
        source = stage.sources[0]
        is_average = self._campaign.get_stage(source).kind == "average"
        run_stage = self._campaign.get_stage(source).sources[0] if is_average else source
        run_dir, run_config = self._get_run_dir(run_stage), self.configs[run_stage]
        model = run_dir / "averages" / source if is_average else run_dir
        overrides = merge_overrides(self._campaign.evaluate, stage.overrides)
        self.configs[stage.name] = _build_evaluation_config(run_dir, run_config, overrides)
        is_selected = any((stage.steps, stage.tokens, stage.every_tokens))
        steps: Sequence[int | None] = _select_steps(stage, run_config) if is_selected else [None]
        _validate_retention([step for step in steps if step is not None], run_stage, run_config)
        data = self._campaign.find_data(stage)
        shown = ", ".join(stage.tasks[:_SHOWN_TASKS]) + ", ..." * (len(stage.tasks) > _SHOWN_TASKS)
        jobs = []
        for step in steps:
            request = _build_request(stage, str(model), step, data)
            directory = run_dir / EVALUATIONS_DIR / request.build_name()
            arguments = [*_format_request(request), *overrides]
            name = stage.name if step is None else f"{stage.name}@{step}"
            where = f"{source} at step {step:,}" if step is not None else source
            result = run_dir / EVALUATIONS_DIR
            job = self._build_job(
                stage, arguments, directory, result, step, detail=f"{shown} {where}"
            )
            jobs.append(replace(job, name=name))
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
        after = [job.name for job in self.jobs if job.stage in stage.dependencies]
        common = self._campaign.launcher
        launcher = {
            name: {**common.get(name, {}), **stage.launcher.get(name, {})}
            for name in {**common, **stage.launcher}
        }
        return StageJob(
            name=stage.name,
            stage=stage.name,
            kind=stage.kind,
            after=tuple(after),
            arguments=tuple(arguments),
            launcher=launcher,
            directory=str(directory),
            result=str(result),
            step=step,
            digest=compute_digest(arguments, config),
            detail=detail,
        )

    def _get_run_dir(self, stage: CampaignStage | str) -> Path:
        return self._campaign.directory / (stage if isinstance(stage, str) else stage.name)


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


def _build_evaluation_config(run_dir: Path, config: Config, overrides: Sequence[str]) -> Config:
    """Return the configuration of an evaluation of a run that has not started."""
    metadata = ModelMetadata(
        run_dir.absolute(),
        config.model,
        config.batch.sequence_length,
        config.precision.weights,
        tuple(operator.value for operator in config.precision.fp32_operators),
    )
    return build_inference_config(metadata, overrides)


def _select_steps(stage: CampaignStage, config: Config) -> list[int]:
    """Return the steps of the selected checkpoints: token counts are rounded up to a step."""
    per_step, last = config.batch.tokens_per_step, compute_total_steps(config)
    start = get_start_step(config)
    tokens = stage.tokens or ()
    if stage.every_tokens is not None:
        first = start * per_step // stage.every_tokens + 1
        end = last * per_step // stage.every_tokens
        tokens = tuple(number * stage.every_tokens for number in range(first, end + 1))
    steps = stage.steps or tuple(-(-count // per_step) for count in tokens)
    steps = tuple(sorted(set(steps)))
    if not steps:
        raise ConfigError(
            f"every_tokens={stage.every_tokens}: the run has only {last * per_step:,} tokens"
        )
    if outside := [step for step in steps if not start < step <= last]:
        raise ConfigError(f"step {outside[0]:,} is not a step of the run: {start:,} to {last:,}")
    return [*steps]


def get_start_step(config: Config) -> int:
    """Return the step from which a run starts."""
    start = config.checkpoint.start_from
    return 0 if start is None else parse_step(Path(start)) or 0


def _validate_retention(steps: Sequence[int], name: str, config: Config) -> None:
    """Raise ConfigError if a run removes one of the checkpoints that a stage reads."""
    checkpoint, per_step = config.checkpoint, config.batch.tokens_per_step
    milestone, every = checkpoint.milestone_tokens, checkpoint.keep_every_steps

    def is_retained(step: int) -> bool:
        is_periodic = every and step % every == 0 and step % checkpoint.every_steps == 0
        return bool(is_periodic) or is_milestone(step, config) or step == last_step

    last_step = compute_total_steps(config)
    if missing := [step for step in steps if not is_retained(step)]:
        raise ConfigError(
            f"{name} does not keep its checkpoint of step {missing[0]:,} "
            f"({missing[0] * per_step:,} tokens): milestone_tokens={milestone}, "
            f"keep_every_steps={every}; choose other steps, or set checkpoint.milestone_tokens or "
            f"checkpoint.keep_every_steps in the train stage"
        )


def _validate_last(count: int, name: str, config: Config) -> None:
    """Raise ConfigError if a run retains fewer checkpoints than the newest ones to average."""
    if count > config.checkpoint.keep_last and config.checkpoint.keep_every_steps is None:
        raise ConfigError(
            f"last={count}: {name} keeps checkpoint.keep_last={config.checkpoint.keep_last} "
            "checkpoints; increase it"
        )


def _validate_continues(name: str, source: Config, config: Config) -> None:
    """Raise ConfigError if a run cannot continue another one."""
    path = f"the last checkpoint of {name}"
    if problems := find_start_problems(config, build_last_state(source), path):
        raise ConfigError(*(f"start_from={name}: {problem}" for problem in problems))
