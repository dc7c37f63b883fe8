"""Batch sizes in sequences and tokens."""

import math
from dataclasses import dataclass, field

from hlat.config.bounds import bounded


@dataclass
class BatchRampConfig:
    """Growth of the batch from a smaller size to global_batch_size, as in Megatron-LM.

    The batch has each size for as many tokens. All steps read the sequences in the order of a run
    without ramp, and the schedule depends on the consumed tokens.
    """

    start: int | None = bounded(None, min=1)
    """Sequences of the first step; null: every step has global_batch_size."""
    increment: int | None = bounded(None, min=1)
    """Sequences by which the batch grows at a time; null: start."""
    tokens: int | None = bounded(None, min=1)
    """Tokens until the batch has global_batch_size; read with a start only."""


@dataclass
class LengthWarmupConfig:
    """Growth of the sequence length to sequence_length, by doubling (arXiv 2108.06084).

    The batch has each length for as many tokens. A step has the same tokens at each length: a
    sequence is divided into shorter ones.
    """

    start: int | None = bounded(None, min=2)
    """Tokens per sequence in the first step, sequence_length divided by a power of two; null: every
    step has sequence_length."""
    tokens: int | None = bounded(None, min=1)
    """Tokens until the sequences have sequence_length; read with a start only."""


@dataclass
class BatchConfig:
    """Global batch size, which the optimizer sees, and its split into micro batches.

    The micro batch size never changes the result.
    """

    global_batch_size: int = bounded(min=1)
    """Sequences per optimizer step, over all data-parallel ranks."""
    micro_batch_size: int | None = bounded(min=1)
    """Sequences per forward pass on one data-parallel rank; null: all sequences of the rank's
    step, or with a ramp the greatest divisor of all sizes."""
    sequence_length: int = bounded(min=2)
    """Tokens per sequence."""
    ramp: BatchRampConfig = field(default_factory=BatchRampConfig)
    """Growth of the batch at the start of the run."""
    length_warmup: LengthWarmupConfig = field(default_factory=LengthWarmupConfig)
    """Growth of the sequence length at the start of the run."""

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of a step with global_batch_size, the unit of schedule and phase."""
        return self.global_batch_size * self.sequence_length

    @property
    def size_divisor(self) -> int:
        """Return the greatest divisor of the batch sizes of all steps."""
        if self.ramp.start is None:
            return self.global_batch_size
        return math.gcd(self.global_batch_size, self.ramp.start, self.ramp.increment or 0)
