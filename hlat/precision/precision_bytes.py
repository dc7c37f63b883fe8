"""Memory of a precision recipe in bytes per parameter.

Terms are separate because parallelism divides each of them differently.
"""

import math
from dataclasses import dataclass

from hlat.config.optimizer import OptimizerConfig
from hlat.config.precision import Dtype, PrecisionConfig
from hlat.model.parameter_spec import ParameterRole, ParameterSpec
from hlat.optim.optimizer_spec import OptimizerSpec, get_optimizer_spec

_ITEMSIZES = {Dtype.fp32: 4, Dtype.bf16: 2}


@dataclass(frozen=True)
class BytesPerParameter:
    """Bytes per parameter by kind of tensor.

    Attributes:
        weights: Parameter in the dtype of the forward pass.
        gradients: Gradient buffer in the accumulation dtype, alive across micro batches.
        transient_gradients: Gradient of one backward pass if its dtype differs from the
            accumulation dtype, alive until it is accumulated.
        master_weights: Copy that the optimizer updates.
        optimizer_state: Tensors of the optimizer, such as moments.
    """

    weights: int
    gradients: int
    transient_gradients: int
    master_weights: int
    optimizer_state: int

    @property
    def optimizer(self) -> int:
        """Sum of what ZeRO stage 1 shards over data-parallel ranks."""
        return self.master_weights + self.optimizer_state

    @property
    def total(self) -> int:
        """Unsharded total across steps, without transient gradients."""
        return self.weights + self.gradients + self.optimizer


def get_itemsize(dtype: Dtype) -> int:
    """Return the bytes of one element."""
    return _ITEMSIZES[dtype]


def compute_bytes_per_parameter(
    precision: PrecisionConfig,
    optimizer: OptimizerSpec,
    role: ParameterRole = ParameterRole.matrix,
) -> BytesPerParameter:
    """Return the bytes of a recipe: with AdamW, bf16_sr 2+2+0+4 and mixed 2+4+4+8."""
    master = precision.master_weight_dtype
    accumulates_in_place = precision.grad_dtype is precision.grad_accum_dtype
    return BytesPerParameter(
        weights=get_itemsize(precision.param_dtype),
        gradients=get_itemsize(precision.grad_accum_dtype),
        transient_gradients=0 if accumulates_in_place else get_itemsize(precision.grad_dtype),
        master_weights=0 if master is None else get_itemsize(master),
        optimizer_state=compute_state_bytes(precision, optimizer, role),
    )


def compute_state_bytes(
    precision: PrecisionConfig, optimizer: OptimizerSpec, role: ParameterRole
) -> int:
    """Return the bytes of an optimizer's state per element of a parameter with its shape."""
    tensors = optimizer.list_state_tensors(role)
    return sum(get_itemsize(tensor.get_dtype(precision)) for tensor in tensors)


def compute_parameter_state_bytes(
    precision: PrecisionConfig, settings: OptimizerConfig, spec: ParameterSpec
) -> int:
    """Return the bytes of an optimizer's state of a canonical parameter."""
    optimizer = get_optimizer_spec(settings.name)
    shapes = optimizer.compute_state_shapes(settings, spec.role, spec.shape)
    return sum(
        math.prod(shapes[tensor.name]) * get_itemsize(tensor.get_dtype(precision))
        for tensor in optimizer.list_state_tensors(spec.role)
        if tensor.name in shapes
    )


def compute_update_bytes(
    precision: PrecisionConfig, optimizer: OptimizerSpec, role: ParameterRole
) -> int:
    """Return the bytes that an update reads and writes per element of a parameter.

    It reads the gradients, reads and writes its state and the (master) weights, and with master
    weights also writes the weights.
    """
    cost = compute_bytes_per_parameter(precision, optimizer, role)
    updated = cost.master_weights or cost.weights
    copied = cost.weights if cost.master_weights else 0
    return cost.gradients + 2 * (updated + cost.optimizer_state) + copied
