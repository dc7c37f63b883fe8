"""Degrees of tensor, pipeline, data and expert parallelism (ParallelDims in torchtitan)."""

from dataclasses import dataclass
from enum import Enum

from hlat.config.bounds import bounded


class ActivationCheckpointing(Enum):
    """Activations that the backward pass recomputes."""

    none = "none"
    """No activation."""
    selective = "selective"
    """Core attention and the SwiGLU hidden layer, as in HLAT."""
    full = "full"
    """Each decoder layer."""


class PipelineSchedule(Enum):
    """Order of forward and backward passes of the micro batches in a pipeline."""

    one_f_one_b = "one_f_one_b"
    """One forward, one backward (1F1B)."""
    interleaved = "interleaved"
    """1F1B over several stages per rank."""
    zero_bubble = "zero_bubble"
    """Interleaved, with weight gradients deferred into the bubbles."""


@dataclass
class ParallelismConfig:
    """Degree of each axis; their product is the number of processes."""

    tp: int = bounded(1, min=1)
    """Tensor-parallel degree."""
    pp: int = bounded(1, min=1)
    """Pipeline-parallel degree: number of ranks over which the layers are split."""
    dp: int | None = bounded(None, min=1)
    """Data-parallel degree; null: number of processes / (tp x pp)."""
    ep: int = bounded(1, min=1)
    """Expert-parallel degree: number of consecutive data-parallel ranks over which the experts of
    each layer are split. It divides dp, and the other dp / ep ranks have replicas."""
    sequence_parallel: bool = False
    """Shard the activations between tensor-parallel regions along the sequence; needs tp > 1."""
    zero: int = bounded(0, min=0, max=3)
    """ZeRO stage, sharded over the data-parallel ranks, and for experts over their replicas: 0
    nothing, 1 optimizer states and master weights, 2 also accumulated gradients, 3 also weights."""
    dp_replicate: int = bounded(1, min=1)
    """Number of replicas of the shards of ZeRO: each has dp / dp_replicate consecutive ranks, and
    gradients are summed over replicas (HSDP with zero 3). More than one needs zero >= 1."""
    pipeline_schedule: PipelineSchedule = PipelineSchedule.one_f_one_b
    """Order of the micro batches in a pipeline."""
    stages_per_rank: int = bounded(1, min=1)
    """Pipeline stages of each rank; more than one needs pipeline_schedule interleaved or
    zero_bubble."""
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.none
    """Activations that the backward pass recomputes."""
