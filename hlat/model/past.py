"""What attention keeps of the tokens that a text has so far, so that none is computed twice.

It is data that flows through the layers beside the tokens. Places in it are positions: the tokens
of a text fill its first ones, whatever other texts of the batch have, so a token overwrites
whatever filled the batch up before, and sees no place behind its own.

Names end in dimensions as in llama.py; L places of a text.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

Keep = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes a layer's k_BGSD and v_BGSD of some tokens, and returns those of all that they may see."""


@dataclass(frozen=True)
class Kept:
    """Keys and values of one layer, at every place of every text."""

    k_BLGD: Tensor
    v_BLGD: Tensor


@dataclass(frozen=True)
class Past:
    """What layers have kept of some texts, and where the tokens that follow belong.

    Attributes:
        layers: What each layer kept, by name.
        positions_BS: Places of the tokens that follow, which their layers fill.
        num_seen: Places that any of these tokens sees, known without asking the device.
    """

    layers: dict[str, Kept]
    positions_BS: Tensor
    num_seen: int

    @property
    def empty(self) -> bool:
        """Whether the tokens that follow are the first ones of every text."""
        return self.num_seen == self.positions_BS.shape[1]

    def visible(self) -> Tensor:
        """Which places (last dimension) each token sees: its own and those before; [B, S, L]."""
        places_L = torch.arange(self.num_seen, device=self.positions_BS.device)
        return places_L <= self.positions_BS.unsqueeze(2)

    def of(self, layer: str) -> Keep:
        """How a layer keeps what it finds."""
        return partial(self._keep, self.layers[layer])

    def _keep(self, kept: Kept, k_BGSD: Tensor, v_BGSD: Tensor) -> tuple[Tensor, Tensor]:
        rows_B1 = torch.arange(len(k_BGSD), device=k_BGSD.device).unsqueeze(1)
        kept.k_BLGD[rows_B1, self.positions_BS] = k_BGSD.transpose(1, 2)
        kept.v_BLGD[rows_B1, self.positions_BS] = v_BGSD.transpose(1, 2)
        if self.empty:
            return k_BGSD, v_BGSD
        seen = slice(0, self.num_seen)
        return kept.k_BLGD[:, seen].transpose(1, 2), kept.v_BLGD[:, seen].transpose(1, 2)
