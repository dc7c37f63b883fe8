"""Checkpoints that the stages of a campaign read, derived from the configurations of the runs.

The runs that write the checkpoints may not have started. Token counts are rounded up to a step:
with 1,024 tokens per step, `tokens: [1500]` selects step 2.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hlat.checkpoint.checkpoint_directory import format_step_name, parse_step
from hlat.checkpoint.start_validation import build_last_state, find_start_problems
from hlat.config.batch_steps import count_steps, count_tokens
from hlat.config.config_errors import ConfigError, raise_config_errors
from hlat.config.run import Config
from hlat.config.run_steps import compute_total_steps, is_milestone
from hlat.jobs.campaign_file import CampaignStage


def select_steps(stage: CampaignStage, config: Config) -> list[int]:
    """Return the steps of the selected checkpoints; raise ConfigError if the run has none."""
    batch, last = config.batch, compute_total_steps(config)
    start, num_tokens = get_start_step(config), count_tokens(last, batch)
    tokens = stage.tokens or ()
    if stage.every_tokens is not None:
        first = count_tokens(start, batch) // stage.every_tokens + 1
        end = num_tokens // stage.every_tokens
        tokens = tuple(number * stage.every_tokens for number in range(first, end + 1))
    steps = stage.steps or tuple(count_steps(count, batch) for count in tokens)
    steps = tuple(sorted(set(steps)))
    if not steps:
        raise ConfigError(
            f"every_tokens={stage.every_tokens}: the run has only {num_tokens:,} tokens"
        )
    if outside := [step for step in steps if not start < step <= last]:
        raise ConfigError(f"step {outside[0]:,} is not a step of the run: {start:,} to {last:,}")
    return [*steps]


def get_start_step(config: Config) -> int:
    """Return the step from which a run starts."""
    start = config.checkpoint.start_from
    return 0 if start is None else parse_step(Path(start)) or 0


def select_start(stage: CampaignStage, config: Config) -> int:
    """Return the step of the checkpoint from which a training stage starts.

    Args:
        stage: The stage, with `start_from`.
        config: Configuration of the run that saves the checkpoint.

    Raises:
        ConfigError: The run does not have this step, or removes its checkpoint.
    """
    name, last, batch = (
        stage.start_from,
        compute_total_steps(config),
        config.batch,
    )
    if stage.at_step is not None:
        key, value, step = "at_step", stage.at_step, stage.at_step
    elif stage.at_tokens is not None:
        key, value, step = "at_tokens", stage.at_tokens, count_steps(stage.at_tokens, batch)
    else:
        return last
    first, selection = get_start_step(config) + 1, f"start_from={name}, {key}={value}"
    if not first <= step <= last:
        raise ConfigError(
            f"{selection}: {name} has the steps {first:,} to {last:,} "
            f"({count_tokens(last, batch):,} tokens) and not {step:,}; choose another "
            f"{key}, or train {name} longer with run.steps and schedule.total_steps"
        )
    checkpoint = config.checkpoint
    if step != last and not _is_periodic(step, config):
        raise ConfigError(
            f"{selection}: {name} does not keep its checkpoint of step {step:,}: "
            f"checkpoint.every_steps={checkpoint.every_steps} and checkpoint.keep_every_steps="
            f"{checkpoint.keep_every_steps or 'null'} (milestones have no optimizer state); set "
            f"both to a divisor of {step} in stages.{name}, or choose another {key}"
        )
    return step


def build_checkpoint_path(name: str, run_dir: Path, config: Config, step: int) -> str:
    """Return the path of a checkpoint of a training stage."""
    root = str(run_dir)
    if config.checkpoint.destination is not None:
        root = f"{config.checkpoint.destination.rstrip('/')}/{name}"
    return f"{root}/checkpoints/{format_step_name(step)}"


def validate_continues(name: str, source: Config, step: int, config: Config) -> None:
    """Raise ConfigError if a run cannot continue another one from its checkpoint of a step."""
    path = f"the checkpoint of step {step:,} of {name}"
    tokens = count_tokens(step, source.batch)
    state = replace(build_last_state(source), step=step, tokens=tokens)
    problems = find_start_problems(config, state, path)
    raise_config_errors(f"start_from={name}: {problem}" for problem in problems)


def validate_retention(steps: Sequence[int], name: str, config: Config) -> None:
    """Raise ConfigError if a run removes one of the checkpoints that a stage reads."""
    checkpoint = config.checkpoint
    milestone, every = checkpoint.milestone_tokens, checkpoint.keep_every_steps

    def is_retained(step: int) -> bool:
        return _is_periodic(step, config) or is_milestone(step, config) or step == last_step

    last_step = compute_total_steps(config)
    if missing := [step for step in steps if not is_retained(step)]:
        raise ConfigError(
            f"{name} does not keep its checkpoint of step {missing[0]:,} "
            f"({count_tokens(missing[0], config.batch):,} tokens): milestone_tokens={milestone}, "
            f"keep_every_steps={every}; choose other steps, or set checkpoint.milestone_tokens or "
            f"checkpoint.keep_every_steps in the train stage"
        )


def validate_last(count: int, name: str, config: Config) -> None:
    """Raise ConfigError if a run retains fewer checkpoints than the newest ones to average."""
    if count > config.checkpoint.keep_last and config.checkpoint.keep_every_steps is None:
        raise ConfigError(
            f"last={count}: {name} keeps checkpoint.keep_last={config.checkpoint.keep_last} "
            "checkpoints; increase it"
        )


def _is_periodic(step: int, config: Config) -> bool:
    """Return True if a checkpoint is retained by checkpoint.keep_every_steps."""
    every = config.checkpoint.keep_every_steps
    return every is not None and step % every == 0 and step % config.checkpoint.every_steps == 0
