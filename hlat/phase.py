"""The timeline of a run in steps: where each stage begins, and where the last one ends.

A phase is written in tokens because that is what a study fixes; a run counts steps. Trainer, data
room and planner must agree on the step at which one mixture gives way to the next, so the rounding
is decided here and nowhere else.
"""

from bisect import bisect_right
from collections.abc import Iterator

from hlat.config.batch import Batch
from hlat.config.phase import Phase, Stage


def boundaries(phase: Phase, batch: Batch) -> tuple[int, ...]:
    """First step of each stage, 0-based.

    A stage begins at the first step boundary at which the stages before it have had at least their
    tokens: ceil(tokens of the stages before / tokens per step). Rounding the running sum, not each
    stage, keeps the error below one step however many stages there are. HLAT-70B's second stage,
    after 1.4 T tokens at 4,194,304 tokens per step, begins at step 333,787. A stage shorter than
    what rounding took from it has no step: its boundary equals the next one's.
    """
    starts = [0, *_ends(phase, batch)]
    return tuple(starts[: len(phase.timeline)])


def num_steps(phase: Phase, batch: Batch) -> int | None:
    """Steps until the last stage has had its tokens, rounded up; None when the last stage is open.

    HLAT-70B: 1.4 T + 400 B tokens at 4,194,304 tokens per step are 429,154 steps.
    """
    ends = list(_ends(phase, batch))
    return ends[-1] if len(ends) == len(phase.timeline) else None


def stage_at(step: int, phase: Phase, batch: Batch) -> Stage:
    """The stage that the 0-based `step` belongs to; from the end of the phase on, the last one."""
    return phase.timeline[bisect_right(boundaries(phase, batch), step) - 1]


def span_at(step: int, phase: Phase, batch: Batch) -> tuple[int, int | None]:
    """First step of the stage that `step` belongs to, and the first one after it.

    The latter is None for an open stage.
    """
    starts = boundaries(phase, batch)
    index = bisect_right(starts, step)
    return starts[index - 1], starts[index] if index < len(starts) else num_steps(phase, batch)


def _ends(phase: Phase, batch: Batch) -> Iterator[int]:
    """First step after each stage of known length."""
    tokens = 0
    last = len(phase.timeline) - 1
    for index, stage in enumerate(phase.timeline):
        if stage.tokens is None:
            assert index == last, "the rules refuse an open stage before the last"
            return
        tokens += stage.tokens
        yield -(-tokens // batch.tokens_per_step)
