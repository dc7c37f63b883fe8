"""Checkpoints that the stages of a campaign read, derived from the configurations of the runs.

The runs that write the checkpoints may not have started. Token counts are rounded up to a step:
with 1,024 tokens per step, `tokens: [1500]` selects step 2.
"""

from collections.abc import Sequence
from pathlib import Path

from hlat.checkpoint.checkpoint_directory import format_step_name, parse_step
from hlat.checkpoint.start_validation import build_last_state, find_start_problems
from hlat.config.config_errors import ConfigError
from hlat.config.run import Config
from hlat.config.run_steps import compute_total_steps, is_milestone
from hlat.jobs.campaign_file import CampaignStage


def select_steps(stage: CampaignStage, config: Config) -> list[int]:
    """Return the steps of the selected checkpoints; raise ConfigError if the run has none."""
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


def build_last_checkpoint_path(name: str, run_dir: Path, config: Config) -> str:
    """Return the path of the last checkpoint of a training stage."""
    root = str(run_dir)
    if config.checkpoint.destination is not None:
        root = f"{config.checkpoint.destination.rstrip('/')}/{name}"
    return f"{root}/checkpoints/{format_step_name(compute_total_steps(config))}"


def validate_continues(name: str, source: Config, config: Config) -> None:
    """Raise ConfigError if a run cannot continue another one."""
    path = f"the last checkpoint of {name}"
    if problems := find_start_problems(config, build_last_state(source), path):
        raise ConfigError(*(f"start_from={name}: {problem}" for problem in problems))


def validate_retention(steps: Sequence[int], name: str, config: Config) -> None:
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


def validate_last(count: int, name: str, config: Config) -> None:
    """Raise ConfigError if a run retains fewer checkpoints than the newest ones to average."""
    if count > config.checkpoint.keep_last and config.checkpoint.keep_every_steps is None:
        raise ConfigError(
            f"last={count}: {name} keeps checkpoint.keep_last={config.checkpoint.keep_last} "
            "checkpoints; increase it"
        )
