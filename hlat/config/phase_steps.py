"""Timeline of a phase in steps: first step of each stage and number of steps.

A phase is configured in tokens, a run counts steps. This module is the only place that rounds, so
that trainer, loader and planner switch the data mixture at the same step. With batch.ramp, a step
is a full batch here (batch_steps.py).
"""

from bisect import bisect_right
from itertools import accumulate

from hlat.config.batch import BatchConfig
from hlat.config.phase import PhaseConfig, PhaseStage


def compute_stage_starts(phase: PhaseConfig, batch: BatchConfig) -> tuple[int, ...]:
    """Return the 0-based first step of each stage.

    A stage starts at ceil(tokens of earlier stages / tokens per step). Rounding the running sum
    instead of each stage bounds the error by one step for any number of stages. HLAT-70B's second
    stage, after 1.4 T tokens at 4,194,304 tokens per step, starts at step 333,787. A stage that
    is rounded to zero steps has the start of the next one.
    """
    starts = [0, *_compute_stage_ends(phase, batch)]
    return tuple(starts[: len(phase.timeline)])


def compute_phase_steps(phase: PhaseConfig, batch: BatchConfig) -> int | None:
    """Return the number of steps of all stages, rounded up; None if the last stage is open.

    HLAT-70B: 1.4 T + 400 B tokens at 4,194,304 tokens per step are 429,154 steps.
    """
    ends = _compute_stage_ends(phase, batch)
    return ends[-1] if len(ends) == len(phase.timeline) else None


def find_stage(step: float, phase: PhaseConfig, batch: BatchConfig) -> PhaseStage:
    """Return the stage of the 0-based `step`; after the end of the phase, the last stage."""
    return phase.timeline[bisect_right(compute_stage_starts(phase, batch), step) - 1]


def find_stage_span(step: float, phase: PhaseConfig, batch: BatchConfig) -> tuple[int, int | None]:
    """Return the first step of the stage of `step` and the first step after it.

    The latter is None for an open stage.
    """
    starts = compute_stage_starts(phase, batch)
    index = bisect_right(starts, step)
    end = starts[index] if index < len(starts) else compute_phase_steps(phase, batch)
    return starts[index - 1], end


def _compute_stage_ends(phase: PhaseConfig, batch: BatchConfig) -> list[int]:
    """Return the first step after each stage of known length; only the last may have none."""
    tokens = accumulate(stage.tokens for stage in phase.timeline if stage.tokens is not None)
    return [-(-end // batch.tokens_per_step) for end in tokens]
