"""Torch dtypes that XLA maps to the dtypes of a recipe.

With the oldest supported SDKs (hlat/engine/neuron) XLA changes dtypes: with XLA_DOWNCAST_BF16
torch's float32 is bf16 on the device and its float64 is fp32; with XLA_USE_BF16 both are bf16.
Later SDKs use torch's dtypes.
"""

import torch

from hlat.config.compiler import CompilerConfig
from hlat.config.precision import Dtype, PrecisionConfig
from hlat.engine.neuron import neuron_environment
from hlat.precision.torch_dtypes import TORCH_DTYPES

_DTYPES_BY_VARIABLE = {
    "XLA_DOWNCAST_BF16": {Dtype.fp32: torch.float64, Dtype.bf16: torch.float32},
    "XLA_USE_BF16": {Dtype.fp32: torch.float32, Dtype.bf16: torch.float32},
}


def get_xla_dtypes(
    compiler: CompilerConfig, precision: PrecisionConfig
) -> dict[Dtype, torch.dtype]:
    """Return torch's dtype for each dtype of a recipe with the configured SDK."""
    variables = neuron_environment.build_neuron_environment(compiler, precision)
    for name, dtypes in _DTYPES_BY_VARIABLE.items():
        if variables.get(name) == "1":
            return dtypes
    return TORCH_DTYPES
