"""Precision recipe: bf16 with stochastic rounding, and RMSNorm and accumulation in fp32.

hlat train extensions=[examples/bf16_fp32_norm.py] precision=bf16_fp32_norm
"""

from hlat.config.components import register_component
from hlat.config.precision import Dtype, Fp32Operator, PrecisionConfig, RoundingMode

register_component(
    "precision",
    "bf16_fp32_norm",
    "bf16 with stochastic rounding; RMSNorm, and sums of gradients, in fp32.",
    PrecisionConfig(
        param_dtype=Dtype.bf16,
        compute_dtype=Dtype.bf16,
        grad_dtype=Dtype.bf16,
        grad_accum_dtype=Dtype.fp32,
        reduce_dtype=Dtype.fp32,
        optimizer_state_dtype=Dtype.bf16,
        fp32_operators=[Fp32Operator.norm],
        rounding=RoundingMode.stochastic,
    ),
)
