"""A precision recipe: which dtype each kind of tensor has, and how it is rounded.

The recipe is data, so that engines, planner and reports read the same table.
"""

from dataclasses import dataclass, field
from enum import Enum

from omegaconf import MISSING


class Dtype(Enum):
    """Floating-point types that a recipe can name."""

    fp32 = "fp32"
    bf16 = "bf16"


class Rounding(Enum):
    """How fp32 results become bf16."""

    nearest = "nearest"
    """To the nearest value, ties to even."""
    stochastic = "stochastic"
    """Up or down with probability proportional to the distance: unbiased."""


class Operator(Enum):
    """Operators that a recipe with bf16 products can compute in fp32."""

    norm = "norm"
    """RMSNorm."""
    softmax = "softmax"
    """Of the attention scores."""
    logits = "logits"
    """Output of the head, as the loss reads it."""
    loss = "loss"
    """Cross-entropy, and the gradient of the head over a micro batch."""


@dataclass
class Precision:
    """One recipe (HLAT paper, section III-D, and the released scripts)."""

    name: str = MISSING
    """The recipe's name."""
    weights: Dtype = MISSING
    """Parameters as the forward pass reads them."""
    compute: Dtype = MISSING
    """Matrix products and activations."""
    gradients: Dtype = MISSING
    """Gradients as the backward pass produces them."""
    accumulation: Dtype = MISSING
    """Sum of gradients over micro batches."""
    reduction: Dtype = MISSING
    """Sum of gradients over data-parallel ranks."""
    optimizer_state: Dtype = MISSING
    """Both Adam moments."""
    master_weights: Dtype | None = None
    """Copy of the weights that the optimizer updates; null: it updates the weights themselves."""
    fp32_operators: list[Operator] = field(default_factory=list)
    """Operators computed in fp32 whatever `compute` says."""
    rounding: Rounding = Rounding.nearest
    """Rounding of every fp32 result stored as bf16."""
    copies_drift: bool = False
    """Where hardware rounds stochastically, let the copies of a weight that tensor-parallel ranks
    hold be rounded apart, as in the paper's runs (section IV-C); engine=nxd only."""
