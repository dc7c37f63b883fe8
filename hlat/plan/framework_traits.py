"""Properties of a training framework that the step time depends on.

The defaults are those of hlat. The comparison with published throughput (benchmarks/planning) sets
those of other frameworks, and of features that configurations of hlat do not have.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class FrameworkTraits:
    """Properties of a framework and of a run with it.

    Attributes:
        compute_factor: Time of computation relative to the planned one.
        attention_factor: Time of its attention kernel relative to that of torch.
        matmul_dtype: Key of hardware.peak_tflops for the matmuls of layers, such as fp8; None:
            that of the compute dtype.
        context_parallel: Ranks that share a sequence. The configuration has the tokens of one rank
            as a sequence, and the ranks as data-parallel ones.
        recomputed_matmuls: Share of the matmuls of a layer that the backward pass computes again;
            None: that of the mode of activation checkpointing.
        tensor_parallel_volume: Bytes of the tensor-parallel collectives relative to those of one
            gather and one reduction in each region and direction.
        tensor_parallel_overlap: Share of the tensor-parallel collectives that overlaps with matmuls
            (asynchronous tensor parallelism).
        has_fused_loss: True if the loss is one kernel, which transfers logits as often as compiled
            operators.
        reduces_once: True if the gradients of ZeRO 2 and 3 are reduced after the last micro batch
            only.
    """

    compute_factor: float = 1.0
    attention_factor: float = 1.0
    matmul_dtype: str | None = None
    context_parallel: int = 1
    recomputed_matmuls: float | None = None
    tensor_parallel_volume: float = 1.0
    tensor_parallel_overlap: float = 0.0
    has_fused_loss: bool = False
    reduces_once: bool = False


HLAT = FrameworkTraits()
"""Traits of hlat's engines."""
