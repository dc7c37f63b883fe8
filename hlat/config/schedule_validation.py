"""Validation of the learning rate: the schedule's, and that of the phase's stages."""

from collections.abc import Callable, Iterable, Iterator

from hlat.config.run import Config
from hlat.config.schedule import ScheduleShape

_FIELDS_BY_SHAPE: dict[ScheduleShape, tuple[str, ...]] = {
    ScheduleShape.constant: (),
    ScheduleShape.cosine: ("min_lr_ratio",),
    ScheduleShape.hlat: ("min_lr_ratio",),
    ScheduleShape.linear: ("min_lr_ratio",),
    ScheduleShape.wsd: ("min_lr_ratio", "decay_steps"),
}
"""Fields that each shape uses in addition to warmup_steps and total_steps."""


def validate_steps(config: Config) -> Iterator[str]:
    """Validate warmup_steps, decay_steps and run.steps against total_steps."""
    schedule, steps = config.schedule, config.run.steps
    total, decay = schedule.total_steps, schedule.decay_steps
    max_decay = total - schedule.warmup_steps
    if schedule.warmup_steps >= total > 0:
        yield (
            f"schedule.warmup_steps={schedule.warmup_steps} is not below "
            f"schedule.total_steps={total}; lower the first or raise the second"
        )
    if decay is not None and decay > max_decay > 0:
        yield (
            f"schedule.decay_steps={decay} exceeds the {max_decay} steps between "
            f"schedule.warmup_steps={schedule.warmup_steps} and "
            f"schedule.total_steps={total}; use {max_decay} or less"
        )
    if steps is not None and steps > total:
        yield (
            f"run.steps={steps} exceeds schedule.total_steps={total}; "
            f"raise the latter, or use run.steps={total} or less"
        )


def validate_shape_fields(config: Config) -> Iterator[str]:
    """Require the fields that the schedule's shape uses, and null for the others."""
    schedule, shape = config.schedule, config.schedule.name
    examples = {"min_lr_ratio": 0.1, "decay_steps": max(1, schedule.total_steps // 5)}
    for key, example in examples.items():
        value = getattr(schedule, key)
        if key in _FIELDS_BY_SHAPE[shape] and value is None:
            yield (
                f"schedule.name={shape.value} reads schedule.{key}, which is null; "
                f"set it, for example to {example}"
            )
        if key not in _FIELDS_BY_SHAPE[shape] and value is not None:
            yield (
                f"schedule.name={shape.value} does not read schedule.{key}={value}; "
                f"use schedule.{key}=null"
            )


def validate_stage_lr(config: Config) -> Iterator[str]:
    """Validate end_lr of each stage: it needs lr, and an end within the schedule."""
    tokens_per_step, total_steps = config.batch.tokens_per_step, config.schedule.total_steps
    tokens: int | None = 0
    for i, stage in enumerate(config.phase.timeline):
        tokens = None if tokens is None or stage.tokens is None else tokens + stage.tokens
        if stage.end_lr is None:
            continue
        key = f"phase.timeline.{i}"
        if stage.lr is None:
            yield (
                f"{key}.end_lr={stage.end_lr} needs {key}.lr, which is null; "
                "set it to the learning rate at the start of the stage"
            )
        if tokens is None or tokens_per_step < 1:
            continue
        if (end := -(-tokens // tokens_per_step)) > total_steps:
            yield (
                f"{key}.end_lr={stage.end_lr} is reached at step {end}, and the run ends at "
                f"schedule.total_steps={total_steps}; use schedule.total_steps={end} or shorter "
                "stages"
            )


SCHEDULE_VALIDATORS: tuple[Callable[[Config], Iterable[str]], ...] = (
    validate_steps,
    validate_shape_fields,
    validate_stage_lr,
)
