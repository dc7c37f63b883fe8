"""Linear layer and embedding that leave their weights uninitialized (weight_initialization.py)."""

from torch import nn


class Linear(nn.Linear):
    """Linear layer that leaves weight and bias uninitialized."""

    def reset_parameters(self) -> None:
        """Do nothing."""


class Embedding(nn.Embedding):
    """Embedding that leaves its weight uninitialized."""

    def reset_parameters(self) -> None:
        """Do nothing."""
