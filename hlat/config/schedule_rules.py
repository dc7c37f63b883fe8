"""Rules about the learning rate over a run: the schedule's, and that of the phase's stages.

As in hlat.config.rules, each is one small function that yields one sentence a violation.
"""

from collections.abc import Callable, Iterable, Iterator

from hlat.config.run import Config
from hlat.config.schedule import Shape

_READ: dict[Shape, tuple[str, ...]] = {
    Shape.constant: (),
    Shape.cosine: ("min_lr_ratio",),
    Shape.hlat: ("min_lr_ratio",),
    Shape.linear: ("min_lr_ratio",),
    Shape.wsd: ("min_lr_ratio", "decay_steps"),
}
"""What each shape of a schedule reads besides warmup_steps and total_steps."""


def warmup_ends(config: Config) -> Iterator[str]:
    """The warm-up is over before the horizon."""
    schedule = config.schedule
    if schedule.warmup_steps >= schedule.total_steps > 0:
        yield (
            f"schedule.warmup_steps={schedule.warmup_steps} is not below "
            f"schedule.total_steps={schedule.total_steps}; lower the first or raise the second"
        )


def shape_is_told(config: Config) -> Iterator[str]:
    """What a shape reads is set; what it does not read is null, lest it seem to count."""
    schedule, shape = config.schedule, config.schedule.name
    usual = {"min_lr_ratio": 0.1, "decay_steps": max(1, schedule.total_steps // 5)}
    for key, value in usual.items():
        found = getattr(schedule, key)
        if key in _READ[shape] and found is None:
            yield (
                f"schedule.name={shape.value} reads schedule.{key}, which is null; "
                f"set it, for example to {value}"
            )
        if key not in _READ[shape] and found is not None:
            yield (
                f"schedule.name={shape.value} does not read schedule.{key}={found}; "
                f"use schedule.{key}=null"
            )


def decay_fits(config: Config) -> Iterator[str]:
    """A decay with a length of its own begins when the warm-up is over."""
    schedule = config.schedule
    decay, room = schedule.decay_steps, schedule.total_steps - schedule.warmup_steps
    if decay is not None and decay > room > 0:
        yield (
            f"schedule.decay_steps={decay} exceeds the {room} steps between "
            f"schedule.warmup_steps={schedule.warmup_steps} and "
            f"schedule.total_steps={schedule.total_steps}; use {room} or less"
        )


def steps_within_schedule(config: Config) -> Iterator[str]:
    """A run cannot be longer than its schedule says what to do."""
    steps, total = config.run.steps, config.schedule.total_steps
    if steps is not None and steps > total:
        yield (
            f"run.steps={steps} exceeds schedule.total_steps={total}; "
            f"raise the latter, or use run.steps={total} or less"
        )


def stage_rates(config: Config) -> Iterator[str]:
    """A stage's own rates are rates, and a line has two ends."""
    for i, stage in enumerate(config.phase.timeline):
        for key, rate in (("lr", stage.lr), ("end_lr", stage.end_lr)):
            if rate is not None and not 0 <= rate < float("inf"):
                yield f"phase.timeline.{i}.{key}={rate} is not a rate; use 0 or more"
        if stage.end_lr is not None and stage.lr is None:
            yield (
                f"phase.timeline.{i}.end_lr={stage.end_lr} needs phase.timeline.{i}.lr, which is "
                "null; set it to the rate that the stage begins with"
            )


def stages_end_within_schedule(config: Config) -> Iterator[str]:
    """A stage that moves to a rate of its own gets there before the horizon ends the run."""
    batch, horizon, tokens = config.batch, config.schedule.total_steps, 0
    if batch.tokens_per_step < 1:
        return
    for i, stage in enumerate(config.phase.timeline):
        if stage.tokens is None:
            return
        tokens += stage.tokens
        end = -(-tokens // batch.tokens_per_step)
        if stage.end_lr is not None and end > horizon:
            yield (
                f"phase.timeline.{i}.end_lr={stage.end_lr} is reached at step {end}, and "
                f"schedule.total_steps={horizon} ends the run before; "
                f"use schedule.total_steps={end} or shorter stages"
            )


RULES: tuple[Callable[[Config], Iterable[str]], ...] = (
    warmup_ends,
    shape_is_told,
    decay_fits,
    steps_within_schedule,
    stage_rates,
    stages_end_within_schedule,
)
"""Every rule here, in the order in which violations are told."""
