"""Batch sizes in sequences and tokens."""

from dataclasses import dataclass

from hlat.config.bounds import bounded


@dataclass
class BatchConfig:
    """Global batch size, which the optimizer sees, and its split into micro batches.

    The micro batch size never changes the result.
    """

    global_batch_size: int = bounded(min=1)
    """Sequences per optimizer step, over all data-parallel ranks."""
    micro_batch_size: int | None = bounded(min=1)
    """Sequences per forward pass on one data-parallel rank; null: all sequences of the rank's
    step."""
    sequence_length: int = bounded(min=2)
    """Tokens per sequence."""

    @property
    def tokens_per_step(self) -> int:
        """Return the number of tokens that one optimizer step consumes."""
        return self.global_batch_size * self.sequence_length
