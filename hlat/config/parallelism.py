"""How one model is cut over processes: tensor, pipeline and data parallelism."""

from dataclasses import dataclass
from enum import Enum


class ActivationCheckpointing(Enum):
    """What the backward pass recomputes instead of keeping."""

    none = "none"
    """Nothing."""
    selective = "selective"
    """Core attention and the SwiGLU product, as HLAT does."""
    full = "full"
    """Each decoder layer."""


@dataclass
class Parallelism:
    """Degrees of each axis; their product is the number of processes."""

    tp: int = 1
    """Tensor-parallel degree."""
    pp: int = 1
    """Pipeline-parallel degree (stages)."""
    dp: int | None = None
    """Data-parallel degree; null: all processes that tp and pp leave."""
    sequence_parallel: bool = False
    """Split the activations between tensor-parallel regions along the sequence; needs tp > 1."""
    zero1: bool = False
    """Shard optimizer states and master weights over the data-parallel ranks (ZeRO stage 1)."""
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.none
    """What the backward pass recomputes."""
