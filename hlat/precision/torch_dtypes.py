"""Torch dtypes of the dtypes in a precision recipe."""

import torch

from hlat.config.precision import Dtype

TORCH_DTYPES = {Dtype.fp32: torch.float32, Dtype.bf16: torch.bfloat16}
