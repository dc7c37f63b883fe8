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


class PipelineSchedule(Enum):
    """In which order a pipeline's ranks compute their micro batches."""

    one_f_one_b = "one_f_one_b"
    """Forward and backward in turn, as soon as there is something to go back (1F1B)."""
    interleaved = "interleaved"
    """1F1B over several stages per rank."""
    zero_bubble = "zero_bubble"
    """Interleaved, with the gradients of weights put off to where a rank would wait."""


@dataclass
class Parallelism:
    """Degrees of each axis; their product is the number of processes."""

    tp: int = 1
    """Tensor-parallel degree."""
    pp: int = 1
    """Pipeline-parallel degree: ranks that share the layers."""
    dp: int | None = None
    """Data-parallel degree; null: all processes that tp and pp leave."""
    sequence_parallel: bool = False
    """Split the activations between tensor-parallel regions along the sequence; needs tp > 1."""
    zero: int = 0
    """What is sharded over the data-parallel ranks (ZeRO stage): 0 nothing, 1 optimizer states and
    master weights, 2 sums of gradients too, 3 weights too."""
    pipeline_schedule: PipelineSchedule = PipelineSchedule.one_f_one_b
    """Order of the micro batches in a pipeline."""
    stages_per_rank: int = 1
    """Pipeline stages of each rank; more than one needs pipeline_schedule interleaved or
    zero_bubble."""
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.none
    """What the backward pass recomputes."""
