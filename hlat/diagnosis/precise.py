"""How far a recipe's numbers may lie from exact ones.

u is the unit roundoff of the widest step in the chain, 2^-24 for fp32 and 2^-8 for bf16. Between a
weight and the loss, and back, each layer rounds about 24 times; roundings are independent, so their
relative errors add up like the root of their number, sqrt(24 L). The factor before it covers what
amplifies an error: the softmax, and the cancellation in sums. Angles of the rotary embedding are
fp32 in every recipe, up to S radians, and so err by S 2^-24.
"""

import math

from hlat.config.precision import Dtype
from hlat.config.run import Config

_UNIT = {Dtype.fp32: 2.0**-24, Dtype.bf16: 2.0**-8}
_ROUNDINGS = 24
_AMPLIFIED = 4


def unit(*dtypes: Dtype) -> float:
    """Unit roundoff of the narrowest of some dtypes."""
    return max(_UNIT[dtype] for dtype in dtypes)


def of_gradients(config: Config) -> float:
    """Largest distance of a parameter's gradient from the exact one, by the norm of the latter."""
    precision = config.precision
    narrow = unit(precision.compute, precision.accumulation, precision.reduction)
    angles = config.batch.sequence_length * _UNIT[Dtype.fp32]
    return _AMPLIFIED * narrow * math.sqrt(_ROUNDINGS * config.model.num_layers) + angles


def of_loss(config: Config) -> float:
    """Largest relative error of a mean loss.

    An error of a logit is one of a term in nats; terms, of which there are hundreds, err apart.
    """
    return of_gradients(config) / 8


def of_norm(config: Config) -> float:
    """Largest relative error of a norm of what is read back: elements err apart there, too."""
    precision = config.precision
    return unit(precision.accumulation, precision.optimizer_state) / 4 + 1e-5
