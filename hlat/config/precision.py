"""Precision recipe (mixed_precision): dtype of each kind of tensor, and rounding mode.

To add a recipe, write conf/precision/<name>.yaml, or register it in an extension
(docs/guides/own-idea.md).
"""

from dataclasses import dataclass, field
from enum import Enum

from omegaconf import MISSING


class Dtype(Enum):
    """Floating-point types of a recipe."""

    fp32 = "fp32"
    bf16 = "bf16"


class RoundingMode(Enum):
    """Rounding from fp32 to bf16."""

    nearest = "nearest"
    """To the nearest value, ties to even."""
    stochastic = "stochastic"
    """Up or down with probability proportional to the distance: unbiased."""


class Fp32Operator(Enum):
    """Operators that a recipe with bf16 matmuls can compute in fp32."""

    norm = "norm"
    """RMSNorm."""
    softmax = "softmax"
    """Softmax of the attention scores."""
    logits = "logits"
    """Output of the head, as input of the loss."""
    loss = "loss"
    """Cross-entropy, and the gradient of the head over a micro batch."""


@dataclass
class PrecisionConfig:
    """One recipe (HLAT paper, section III-D, and the released scripts)."""

    name: str = MISSING
    """The recipe's name."""
    param_dtype: Dtype = MISSING
    """Parameters in the forward pass."""
    compute_dtype: Dtype = MISSING
    """Matmuls and activations."""
    grad_dtype: Dtype = MISSING
    """Gradients as the backward pass produces them."""
    grad_accum_dtype: Dtype = MISSING
    """Sum of gradients over micro batches."""
    reduce_dtype: Dtype = MISSING
    """Sum of gradients over data-parallel ranks."""
    optimizer_state_dtype: Dtype = MISSING
    """State of the optimizer, such as moments."""
    master_weight_dtype: Dtype | None = None
    """Copy of the weights that the optimizer updates; null: the optimizer updates the weights."""
    fp32_operators: list[Fp32Operator] = field(default_factory=list)
    """Operators computed in fp32 under every `compute_dtype`."""
    rounding: RoundingMode = RoundingMode.nearest
    """Rounding of every fp32 result stored as bf16."""
    allow_replica_divergence: bool = False
    """With stochastic rounding in hardware, allow the replicas of a weight on tensor-parallel ranks
    to be rounded differently, as in the paper's runs (section IV-C); engine=nxd only."""
