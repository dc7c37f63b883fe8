"""Batch size, sequence length and tokens of each step.

Only batch.ramp makes the tokens of a step differ. The schedule and the stages of the phase are
counted in full batches, those with batch.global_batch_size sequences, so that a run with a ramp and
one without have the same learning rate and mixture after the same tokens.
"""

from itertools import pairwise
from typing import NamedTuple

from hlat.config.batch import BatchConfig


class BatchStage(NamedTuple):
    """Consecutive steps with the same batch size."""

    first_step: int
    """First step, counted from 0."""
    first_sequence: int
    """Sequences of all steps before it."""
    size: int
    """Sequences of a step."""


class BatchShape(NamedTuple):
    """Consecutive steps with the same batch size and sequence length."""

    num_steps: int
    """Number of steps."""
    size: int
    """Sequences of batch.sequence_length tokens in a step."""
    length: int
    """Tokens per sequence."""


def list_batch_stages(batch: BatchConfig) -> list[BatchStage]:
    """Return the stages of the ramp and the stage of full batches, the last one.

    The ramp reaches its i-th size in the first step after i / n of its tokens, for n sizes below
    global_batch_size. Rounding the running sum bounds the error by one step.
    """
    ramp, stages = batch.ramp, list[BatchStage]()
    step = sequence = 0
    if ramp.start is not None and ramp.tokens is not None:
        sizes = range(ramp.start, batch.global_batch_size, ramp.increment or ramp.start)
        for i, size in enumerate(sizes, start=1):
            end = -(-ramp.tokens * i // (len(sizes) * batch.sequence_length))
            num_steps = max(0, -(-(end - sequence) // size))
            stages.append(BatchStage(step, sequence, size))
            step, sequence = step + num_steps, sequence + num_steps * size
    return [*stages, BatchStage(step, sequence, batch.global_batch_size)]


def get_batch_size(step: int, batch: BatchConfig) -> int:
    """Return the sequences, of sequence_length tokens, of the 0-based `step`."""
    return _find_stage(step, batch).size


def count_step_tokens(step: int, batch: BatchConfig) -> int:
    """Return the tokens of the 0-based `step`."""
    return get_batch_size(step, batch) * batch.sequence_length


def count_tokens(num_steps: int, batch: BatchConfig) -> int:
    """Return the tokens of the first `num_steps` steps."""
    stage = _find_stage(num_steps, batch)
    num_sequences = stage.first_sequence + (num_steps - stage.first_step) * stage.size
    return num_sequences * batch.sequence_length


def count_steps(num_tokens: int, batch: BatchConfig) -> int:
    """Return the fewest steps with at least `num_tokens` tokens."""
    num_sequences = -(-num_tokens // batch.sequence_length)
    stages = list_batch_stages(batch)
    stage = next(one for one in reversed(stages) if one.first_sequence <= num_sequences)
    return stage.first_step + -(-(num_sequences - stage.first_sequence) // stage.size)


def count_full_batches(num_steps: int, batch: BatchConfig) -> int:
    """Return the full batches that contain the sequences of the first `num_steps` steps."""
    return -(-count_tokens(num_steps, batch) // batch.tokens_per_step)


def compute_schedule_step(step: int, batch: BatchConfig) -> float:
    """Return the full batches before the 0-based `step`; `step` itself without a ramp."""
    if batch.ramp.start is None:
        return step
    return count_tokens(step, batch) / batch.tokens_per_step


def list_length_starts(batch: BatchConfig) -> list[tuple[int, int]]:
    """Return the first step and the tokens per sequence of each length of the warm-up."""
    warmup, length = batch.length_warmup, batch.sequence_length
    if warmup.start is None or warmup.tokens is None:
        return [(0, length)]
    num_doublings = (length // warmup.start).bit_length() - 1
    ends = [-(-warmup.tokens * i // num_doublings) for i in range(num_doublings + 1)]
    return [(count_steps(end, batch), warmup.start << i) for i, end in enumerate(ends)]


def get_sequence_length(step: int, batch: BatchConfig) -> int:
    """Return the tokens per sequence of the 0-based `step`."""
    starts = list_length_starts(batch)
    return next(length for first, length in reversed(starts) if first <= step)


def list_batch_shapes(num_steps: int, batch: BatchConfig) -> list[BatchShape]:
    """Return the consecutive batch shapes of a run of `num_steps` steps."""
    starts = {one.first_step for one in list_batch_stages(batch)}
    starts |= {first for first, _ in list_length_starts(batch)}
    bounds = sorted(start for start in {*starts, num_steps} if start <= num_steps)
    return [
        BatchShape(end - start, get_batch_size(start, batch), get_sequence_length(start, batch))
        for start, end in pairwise(bounds)
    ]


def format_growth(batch: BatchConfig) -> str:
    """Return the ramp and the warm-up of the length, such as ", from 2 over ..."; empty without."""
    ramp, warmup, text = batch.ramp, batch.length_warmup, ""
    if ramp.start is not None and ramp.tokens is not None:
        text = f", from {ramp.start:,} sequences over {ramp.tokens:,} tokens"
    if warmup.start is not None and warmup.tokens is not None:
        text += f", from a length of {warmup.start:,} over {warmup.tokens:,} tokens"
    return text


def _find_stage(step: int, batch: BatchConfig) -> BatchStage:
    if batch.ramp.start is None:
        return BatchStage(0, 0, batch.global_batch_size)
    return next(one for one in reversed(list_batch_stages(batch)) if one.first_step <= step)
