"""Check of the learning rates of a run against formulas from the publications of the schedules.

Only steps at which the rate may change its formula, and some between them, are compared in a long
run. The timeline of the phase is computed in tokens.
"""

import math
from collections.abc import Iterator
from itertools import accumulate, islice, takewhile

import numpy as np

from hlat.config.run import Config
from hlat.config.schedule import ScheduleConfig
from hlat.doctor.check_result import CheckResult, FaultLocation, build_result
from hlat.doctor.engine_harness import EngineHarness
from hlat.doctor.reference_packing import find_stage, iter_batch_sizes
from hlat.optim import lr_schedule

_NUM_SPREAD_STEPS = 500
_SHAPES = ("constant", "cosine", "hlat", "inverse_sqrt", "linear", "power", "wsd")
"""Schedules with a formula below."""
_TOLERANCE = 1e-9
"""Maximum error relative to the largest rate; both implementations are in fp64."""


def check_schedule(harness: EngineHarness) -> Iterator[CheckResult]:
    """Check the learning rate of each step, including those of stages with a rate of their own.

    The schedule of an extension has no formula here; its rates must not exceed the peak.
    """
    config, steps = harness.config, _select_steps(harness.config)
    subject = f"schedule={config.schedule.name}"
    rates = np.array([lr_schedule.compute_lr(step, config) for step in steps])
    expected, numbers = list[float](), dict[str, float]()
    if config.schedule.name in _SHAPES:
        num_sequences = [0, *accumulate(islice(iter_batch_sizes(config.batch), steps[-1]))]
        positions = [num_sequences[step] / config.batch.global_batch_size for step in steps]
        expected = [compute_reference_rate(config, position) for position in positions]
        errors = np.abs(rates - expected) / max(expected)
        wrong = np.flatnonzero(~(errors <= _TOLERANCE))
        stages = [stage.name for stage in config.phase.timeline if stage.lr is not None]
        subject += f" and of stages {', '.join(stages)}" if stages else ""
        passed, failed = f"are those of the formulas to {errors.max():.1e}", "differ"
        numbers["largest"] = float(errors.max())
    else:
        rates_of_stages = [r for stage in config.phase.timeline for r in (stage.lr, stage.end_lr)]
        peak = max(rate for rate in (config.optimizer.lr, *rates_of_stages) if rate is not None)
        wrong = np.flatnonzero(~((rates >= 0) & (rates <= peak * (1 + _TOLERANCE))))
        passed, failed = f"are between 0 and {peak:g}", f"are not between 0 and the peak {peak:g}"
    first = wrong[0] if wrong.size else 0
    reference = f", expected {expected[first]:.6g}" if expected else ""
    yield build_result(
        "schedule",
        [FaultLocation(f"rate of step {steps[first]}", "schedule")] if wrong.size else [],
        f"{len(steps)} rates of {subject} {passed}",
        f"{len(wrong)} of {len(steps)} rates of {subject} {failed}, first at step {steps[first]}: "
        f"{rates[first]:.6g}{reference}",
        **numbers,
    )


def compute_reference_rate(config: Config, step: float) -> float:
    """Return the learning rate after a number of full batches."""
    tokens_per_step = config.batch.tokens_per_step
    ends = [*accumulate(stage.tokens or 0 for stage in config.phase.timeline)]
    index = find_stage(config, step)
    stage = config.phase.timeline[index]
    if stage.lr is None:
        return config.optimizer.lr * _compute_factor(config.schedule, step)
    if stage.end_lr is None:
        return stage.lr
    first = math.ceil(ends[index - 1] / tokens_per_step) if index else 0
    last = math.ceil(ends[index] / tokens_per_step)
    if stage.tokens is None:
        last = config.schedule.total_steps
    passed = min(1.0, (step - first) / (last - first)) if last > first else 0.0
    return stage.lr * (1 - passed) + stage.end_lr * passed


def _compute_factor(schedule: ScheduleConfig, step: float) -> float:
    """Return the rate relative to its peak.

    Sources: arXiv 1608.03983, equation 5 (cosine), scheduler.py of awslabs/HLAT (hlat), arXiv
    2502.15938 (linear), 2405.18392 (wsd, with a decay of 1 - sqrt), 1706.03762 (inverse_sqrt) and
    2408.13359 (power).
    """
    shape, warmup, floor = schedule.name, schedule.warmup_steps, schedule.min_lr_ratio or 0.0
    if step < warmup:
        return (step + (shape != "hlat")) / warmup
    progress = min(1.0, (step - warmup) / (schedule.total_steps - warmup))
    match shape:
        case "constant":
            return 1.0
        case "cosine":
            return floor + (1 - floor) * math.cos(math.pi * progress / 2) ** 2
        case "hlat":
            return max(floor, math.cos(math.pi * progress / 2) ** 2)
        case "inverse_sqrt":
            return max(floor, 1 / math.sqrt((step + 1) / max(1, warmup)))
        case "power":
            assert schedule.decay_steps is not None
            law = math.pow((step + 1) / schedule.power.start_step, schedule.power.exponent)
            left = min(1.0, max(0, schedule.total_steps - step) / schedule.decay_steps)
            return min(1.0, law) * (floor + (1 - floor) * left)
        case "linear":
            return 1 - (1 - floor) * progress
        case "wsd":
            assert schedule.decay_steps is not None
            decayed = step - (schedule.total_steps - schedule.decay_steps)
            share = min(1.0, max(0, decayed) / schedule.decay_steps)
            return 1 - (1 - floor) * math.sqrt(share)
    raise NotImplementedError(f"schedule.name={shape}")


def _select_steps(config: Config) -> list[int]:
    """Return the steps around each change of the formula, and others spread over the run."""
    schedule, total = config.schedule, config.schedule.total_steps
    ends = accumulate(stage.tokens for stage in config.phase.timeline if stage.tokens is not None)
    changes = [0, schedule.warmup_steps, total - (schedule.decay_steps or 0), total]
    changes += [end // config.batch.tokens_per_step for end in ends]
    full_size = config.batch.global_batch_size
    num_ramp_steps = sum(1 for _ in takewhile(full_size.__gt__, iter_batch_sizes(config.batch)))
    last = max(changes) + num_ramp_steps
    steps = {change + offset for change in [*changes, num_ramp_steps] for offset in range(-2, 3)}
    steps |= {*np.linspace(0, last, _NUM_SPREAD_STEPS).astype(int).tolist()}
    return sorted(step for step in steps if step >= 0)
