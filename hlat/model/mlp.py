"""Feed-forward network. Tensor names end in their dimensions as in decoder.py."""

# ruff: noqa: N812

import torch.nn.functional as F
from torch import Tensor, nn

from hlat.config.components import set_implementation
from hlat.config.model import ModelConfig
from hlat.model.autograd_functions import geglu, swiglu
from hlat.model.linear import Linear
from hlat.model.mlp_spec import Activation, compute_block_size


class GatedActivation(nn.Module):
    """activation(gate) * up of alternating blocks; activation checkpointing can wrap the module."""

    def __init__(self, activation: Activation, block_size: int) -> None:
        super().__init__()
        self.activation, self.block_size = activation, block_size

    def forward(self, gate_up_BS2I: Tensor) -> Tensor:
        """Return activation(gate) * up; [B, S, 2 I] to [B, S, I]."""
        glu = swiglu if self.activation is Activation.swiglu else geglu
        return glu(gate_up_BS2I, self.block_size)


class UngatedActivation(nn.Module):
    """Nonlinearity of one projection; activation checkpointing can wrap the module."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, up_BSI: Tensor) -> Tensor:
        """Return the nonlinearity of each element."""
        if self.activation is Activation.relu2:
            return F.relu(up_BSI).square()
        return F.gelu(up_BSI, approximate="tanh")


class MLP(nn.Module):
    """Feed-forward network; rows of gate_up_proj alternate gate and up blocks."""

    def __init__(self, model: ModelConfig, intermediate_size: int | None = None) -> None:
        """Build a network; the default width is model.intermediate_size."""
        super().__init__()
        hidden, intermediate = model.hidden_size, intermediate_size or model.intermediate_size
        activation = model.mlp.activation
        self.is_gated = activation.is_gated
        if self.is_gated:
            self.gate_up_proj = Linear(hidden, 2 * intermediate, bias=False)
            self.activation: nn.Module = GatedActivation(
                activation, compute_block_size(intermediate, model.num_attention_heads)
            )
        else:
            self.up_proj = Linear(hidden, intermediate, bias=False)
            self.activation = UngatedActivation(activation)
        self.down_proj = Linear(intermediate, hidden, bias=False)

    @property
    def input_proj(self) -> Linear:
        """Projection that reads the input."""
        return self.gate_up_proj if self.is_gated else self.up_proj

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Apply the network to each position; returns [B, S, H]."""
        y_BSH: Tensor = self.down_proj(self.activation(self.input_proj(x_BSH)))
        return y_BSH


set_implementation("model.mlp", "dense", MLP)
