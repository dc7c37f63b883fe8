"""Root mean square normalization.

Tensor names end in their dimensions as in decoder.py; x_F are the normalized elements.
"""

# ruff: noqa: N812

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hlat.config.components import get_implementation, set_implementation
from hlat.config.model import ModelConfig
from hlat.model.autograd_functions import rms_norm


class RMSNorm(nn.RMSNorm):
    """Root mean square normalization, optionally computed in fp32 for bf16 inputs."""

    eps: float

    def __init__(self, model: ModelConfig, num_features: int, fp32: bool) -> None:
        super().__init__(num_features, model.rms_norm_eps)
        self.fp32, self.zero_centered = fp32, model.norm.zero_centered

    def forward(self, x_F: Tensor) -> Tensor:
        """Normalize over the last dimension, then multiply by the weight, or 1 + weight."""
        weight_F = self.get_scale()
        if x_F.is_cpu and x_F.dtype is not torch.float64:  # torch has no fused CPU kernel
            return rms_norm(x_F, weight_F, self.eps)
        if not self.fp32:
            return F.rms_norm(x_F, self.normalized_shape, weight_F.to(x_F.dtype), self.eps)
        y_F = F.rms_norm(x_F.float(), self.normalized_shape, weight_F.float(), self.eps)
        return y_F.to(x_F.dtype)

    def get_scale(self) -> Tensor:
        """Return the factors of the normalized elements, in fp32 if zero-centered."""
        return 1 + self.weight.float() if self.zero_centered else self.weight


class ProjectionNorm(RMSNorm):
    """RMSNorm over all heads of a projection, of which a rank may have a shard.

    `all_reduce` sums the squares of the shards of all ranks, and `num_features` counts the features
    of all ranks.
    """

    def __init__(self, model: ModelConfig, num_features: int, fp32: bool) -> None:
        super().__init__(model, num_features, fp32)
        self.num_features = num_features
        self.all_reduce: Callable[[Tensor], Tensor] | None = None

    def forward(self, x_F: Tensor) -> Tensor:
        """Normalize over the last dimension of all shards."""
        if self.all_reduce is None:
            return super().forward(x_F)
        fp32_F = x_F.float()
        squares_1 = self.all_reduce(fp32_F.square().sum(-1, keepdim=True))
        scale_1 = torch.rsqrt(squares_1 / self.num_features + self.eps)
        return (fp32_F * scale_1 * self.get_scale().float()).to(x_F.dtype)


def build_norm(model: ModelConfig, fp32: bool) -> nn.Module:
    """Return a norm over the hidden size, of the model's kind."""
    norm: nn.Module = get_implementation("model.norm", model.norm.kind)(
        model, model.hidden_size, fp32
    )
    return norm


set_implementation("model.norm", "rms", RMSNorm)
