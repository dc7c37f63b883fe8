"""Tolerances of the checks, from the dtypes of a precision recipe.

u is the unit roundoff of the narrowest dtype in the chain, 2^-24 for fp32 and 2^-8 for bf16.
Between a weight and the loss, and back, each layer rounds about 24 times. Roundings are
independent, so relative errors grow as the square root of their number, sqrt(24 L). A factor covers
amplification by the softmax and by cancellation in sums. Rotary angles are fp32 in every recipe,
up to S radians, with an error of S 2^-24.
"""

import math

from hlat.config.precision import Dtype
from hlat.config.run import Config

_UNIT_ROUNDOFF = {Dtype.fp32: 2.0**-24, Dtype.bf16: 2.0**-8}
_ROUNDINGS_PER_LAYER = 24
_AMPLIFICATION = 4


def compute_unit_roundoff(*dtypes: Dtype) -> float:
    """Return the unit roundoff of the narrowest of some dtypes."""
    return max(_UNIT_ROUNDOFF[dtype] for dtype in dtypes)


def compute_gradient_tolerance(config: Config) -> float:
    """Return the maximum error norm of a gradient, relative to the norm of the exact one."""
    precision = config.precision
    roundoff = compute_unit_roundoff(
        precision.compute_dtype, precision.grad_accum_dtype, precision.reduce_dtype
    )
    num_roundings = _ROUNDINGS_PER_LAYER * config.model.num_layers
    angle_error = config.batch.sequence_length * _UNIT_ROUNDOFF[Dtype.fp32]
    return _AMPLIFICATION * roundoff * math.sqrt(num_roundings) + angle_error


def compute_loss_tolerance(config: Config) -> float:
    """Return the maximum relative error of a mean loss.

    An error of a logit is an error of one term in nats; the errors of hundreds of terms are
    independent.
    """
    return compute_gradient_tolerance(config) / 8


def compute_norm_tolerance(config: Config) -> float:
    """Return the maximum relative error of a norm, whose elements have independent errors."""
    precision = config.precision
    dtypes = precision.grad_accum_dtype, precision.optimizer_state_dtype
    return compute_unit_roundoff(*dtypes) / 4 + 1e-5
