"""Sizes of a step, in sequences and tokens.

The global batch is what the optimizer sees; the micro batch is only how it is cut, and never
changes the result.
"""

from dataclasses import dataclass

from omegaconf import MISSING


@dataclass
class Batch:
    """Sequences per optimizer step and how they are cut."""

    global_batch_size: int = MISSING
    """Sequences per optimizer step, over all data-parallel ranks."""
    micro_batch_size: int | None = MISSING
    """Sequences per forward pass on one data-parallel rank; null: all that it has of a step."""
    sequence_length: int = MISSING
    """Tokens per sequence."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step consumes."""
        return self.global_batch_size * self.sequence_length
