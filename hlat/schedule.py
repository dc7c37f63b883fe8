"""The learning rate of a step.

A pure function of the step, so that a resumed run, a planner's figure and a test see the same rate
without replaying a scheduler's state.
"""

import math
from collections.abc import Callable

from hlat.config.run import Config
from hlat.config.schedule import Schedule, Shape
from hlat.phase import span_at, stage_at


def rate_at(step: int, config: Config) -> float:
    """The rate used in one optimizer step of a run.

    A stage of the phase that has an `lr` sets its own: constant, or with an `end_lr` a straight
    line that the first step after the stage would reach. An open stage ends at
    schedule.total_steps. Every other stage has the schedule's rate of that step, as if the stages
    before it had not set theirs.

    Args:
        step: 0-based index of the step being executed, from the begin of the run.
        config: Resolved configuration.

    Returns:
        The rate.
    """
    stage = stage_at(step, config.phase, config.batch)
    if stage.lr is None:
        return learning_rate(step, config.schedule, config.optimizer.lr)
    if stage.end_lr is None:
        return stage.lr
    begin, end = span_at(step, config.phase, config.batch)
    done = _done(step, begin, config.schedule.total_steps if end is None else end)
    return stage.lr + (stage.end_lr - stage.lr) * done


def learning_rate(step: int, schedule: Schedule, peak: float) -> float:
    """The rate of a schedule: a linear warm-up, then its shape, from total_steps on the floor.

    The warm-up is (step + 1) / warmup_steps, so that no step is lost; that of `hlat` is the
    released scheduler.py's (awslabs/HLAT) step / warmup_steps, whose very first step has rate 0.

    Args:
        step: 0-based index of the step being executed.
        schedule: Shape, warm-up, horizon and floor.
        peak: Rate after warm-up.

    Returns:
        The rate.
    """
    if step < schedule.warmup_steps:
        begun = step if schedule.name is Shape.hlat else step + 1
        return peak * begun / schedule.warmup_steps
    return peak * _SHAPES[schedule.name](step, schedule)


def constant(step: int, schedule: Schedule) -> float:
    """The peak for ever: a trunk from which decays of any length branch off (arXiv 2405.18392)."""
    return 1.0


def cosine(step: int, schedule: Schedule) -> float:
    """Half a cosine to the floor, reached at total_steps (arXiv 1608.03983, equation 5)."""
    return _above_floor(_half_cosine(step, schedule), schedule)


def hlat(step: int, schedule: Schedule) -> float:
    """Half a cosine to zero, clamped at the floor: max(min_lr_ratio, (1 + cos(pi p)) / 2).

    p is the share of the decay that is done. This is the released scheduler.py (awslabs/HLAT): it
    meets a floor of a tenth at step 397,994 of 500,000, not at the horizon.
    """
    return max(_floor(schedule), _half_cosine(step, schedule))


def linear(step: int, schedule: Schedule) -> float:
    """A straight line to the floor, reached at total_steps (to zero: D2Z, arXiv 2502.15938)."""
    done = _done(step, schedule.warmup_steps, schedule.total_steps)
    return _above_floor(1 - done, schedule)


def wsd(step: int, schedule: Schedule) -> float:
    """The peak until decay_steps before the horizon, then 1 - sqrt(p) to the floor.

    p is the share of the decay that is done. Warm-up, stable, decay is MiniCPM's (arXiv 2404.06395,
    section 4), which decays exponentially over the last tenth; 1 - sqrt is the form that arXiv
    2405.18392 finds consistently better than a straight line, there over the last fifth, to zero.
    """
    assert schedule.decay_steps is not None, "the rules refuse wsd without decay_steps"
    begin = schedule.total_steps - schedule.decay_steps
    return _above_floor(1 - math.sqrt(_done(step, begin, schedule.total_steps)), schedule)


_SHAPES: dict[Shape, Callable[[int, Schedule], float]] = {
    Shape.constant: constant,
    Shape.cosine: cosine,
    Shape.hlat: hlat,
    Shape.linear: linear,
    Shape.wsd: wsd,
}
"""Rate after warm-up as a share of the peak."""


def _half_cosine(step: int, schedule: Schedule) -> float:
    done = _done(step, schedule.warmup_steps, schedule.total_steps)
    return 0.5 * (1 + math.cos(math.pi * done))


def _done(step: int, begin: int, end: int) -> float:
    """Share of the way from `begin` to `end` that lies behind a step."""
    return min(1.0, max(0.0, (step - begin) / max(1, end - begin)))


def _above_floor(share: float, schedule: Schedule) -> float:
    floor = _floor(schedule)
    return floor + (1 - floor) * share


def _floor(schedule: Schedule) -> float:
    assert schedule.min_lr_ratio is not None, "the rules refuse a decay without a floor"
    return schedule.min_lr_ratio
