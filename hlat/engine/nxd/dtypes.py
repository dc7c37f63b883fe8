"""What torch must be asked for, so that XLA holds the dtypes that a recipe names.

Under the SDK's oldest pins (hlat.compiler) XLA renames dtypes behind torch's back: with
XLA_DOWNCAST_BF16 what torch calls float32 is bf16 on the device and its float64 is fp32 there; with
XLA_USE_BF16 both are bf16. Later pins take torch at its word.
"""

import torch

from hlat import compiler
from hlat.config.compiler import Compiler
from hlat.config.precision import Dtype, Precision
from hlat.engine.dtypes import DTYPES

_BY_VARIABLE = {
    "XLA_DOWNCAST_BF16": {Dtype.fp32: torch.float64, Dtype.bf16: torch.float32},
    "XLA_USE_BF16": {Dtype.fp32: torch.float32, Dtype.bf16: torch.float32},
}


def torch_dtypes(settings: Compiler, precision: Precision) -> dict[Dtype, torch.dtype]:
    """Return torch's dtype for each of a recipe's, under the pin."""
    variables = compiler.environment(settings, precision)
    renamed = [dtypes for name, dtypes in _BY_VARIABLE.items() if variables.get(name) == "1"]
    return renamed[0] if renamed else DTYPES
