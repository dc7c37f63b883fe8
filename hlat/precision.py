"""What a precision recipe costs in memory.

The recipes differ in which copies of the weights exist and how wide they are; a planner needs these
bytes by name because parallelism divides each of them differently.
"""

from dataclasses import dataclass

from hlat.config.precision import Dtype, Precision

_ROUNDING_DEVICES = frozenset({"neuron", "xla"})
"""Torch device types whose hardware rounds stochastically, told by NEURON_RT_STOCHASTIC_ROUNDING_EN
(see hlat.compiler); elsewhere it is emulated."""
_BYTES = {Dtype.fp32: 4, Dtype.bf16: 2}


@dataclass(frozen=True)
class BytesPerParameter:
    """Bytes that one weight costs, by what they hold.

    Attributes:
        weights: The weight as the forward pass reads it.
        gradients: The gradient buffer that lives from micro batch to micro batch, in the dtype of
            accumulation.
        transient_gradients: The backward pass's own gradient, where its dtype is not that of
            accumulation; it lives until it is added.
        master_weights: The copy that the optimizer updates.
        moments: Both Adam moments.
    """

    weights: int
    gradients: int
    transient_gradients: int
    master_weights: int
    moments: int

    @property
    def optimizer(self) -> int:
        """What ZeRO stage 1 shards over the data-parallel ranks: master weights and moments."""
        return self.master_weights + self.moments

    @property
    def total(self) -> int:
        """All that lives from step to step, unsharded: without the transient gradients."""
        return self.weights + self.gradients + self.optimizer


def bytes_of(dtype: Dtype) -> int:
    """Bytes of one element."""
    return _BYTES[dtype]


def rounds_by_itself(device_type: str) -> bool:
    """Whether a recipe's stochastic rounding is the hardware's on this torch device type."""
    return device_type in _ROUNDING_DEVICES


def bytes_per_parameter(precision: Precision) -> BytesPerParameter:
    """Bytes per weight of a recipe: HLAT-7B's bf16_sr 2+2+0+4, HLAT-70B's mixed 2+4+4+8."""
    master = precision.master_weights
    added_in_place = precision.gradients is precision.accumulation
    return BytesPerParameter(
        weights=bytes_of(precision.weights),
        gradients=bytes_of(precision.accumulation),
        transient_gradients=0 if added_in_place else bytes_of(precision.gradients),
        master_weights=0 if master is None else bytes_of(master),
        moments=2 * bytes_of(precision.optimizer_state),
    )
