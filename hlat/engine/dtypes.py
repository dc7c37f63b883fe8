"""torch's names for the dtypes of a recipe."""

import torch

from hlat.config.precision import Dtype

DTYPES = {Dtype.fp32: torch.float32, Dtype.bf16: torch.bfloat16}
