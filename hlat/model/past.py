"""What attention keeps of the tokens that a text has so far, so that none is computed twice.

It is data that flows through the layers beside the tokens. Places in it are positions: the tokens
of a text fill its first ones, whatever other texts of the batch have, so a token overwrites
whatever filled the batch up before, and sees no place behind its own.

Names end in dimensions as in llama.py; L places of a text.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

Keep = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes a layer's k_BGSD and v_BGSD of some tokens, and returns those of all that they may see."""


@dataclass(frozen=True)
class Kept:
    """Keys and values of one layer, at every place of every text."""

    k_BLGD: Tensor
    v_BLGD: Tensor

    def of(self, rows: slice) -> "Kept":
        """The same memory of some of the texts."""
        return Kept(self.k_BLGD[rows], self.v_BLGD[rows])


@dataclass(frozen=True)
class Past:
    """What layers have kept of some texts, and where the tokens that follow belong.

    Attributes:
        layers: What each layer kept, by name.
        positions_BS: Places of the tokens that follow, which their layers fill.
        num_seen: Places that any of these tokens sees, known without asking the device.
        even: Whether all of the texts are equally long before them.
    """

    layers: dict[str, Kept]
    positions_BS: Tensor
    num_seen: int
    even: bool

    @property
    def empty(self) -> bool:
        """Whether the tokens that follow are the first ones of every text."""
        return self.num_seen == self.positions_BS.shape[1]

    @property
    def masked(self) -> bool:
        """Whether attention needs to be told what each token sees.

        It knows of first tokens, which see those before, and of one of each text, which sees all.
        """
        return not (self.empty or (self.even and self.positions_BS.shape[1] == 1))

    def visible(self) -> Tensor:
        """Which places (last dimension) each token sees: its own and those before; [B, S, L]."""
        places_L = torch.arange(self.num_seen, device=self.positions_BS.device)
        return places_L <= self.positions_BS.unsqueeze(2)

    def of(self, layer: str) -> Keep:
        """How a layer keeps what it finds."""
        return partial(self._keep, self.layers[layer])

    def _keep(self, kept: Kept, k_BGSD: Tensor, v_BGSD: Tensor) -> tuple[Tensor, Tensor]:
        if not kept.k_BLGD.shape[1]:  # nothing came before, and nothing will follow
            return k_BGSD, v_BGSD.contiguous()
        kept.k_BLGD[self._places] = k_BGSD.transpose(1, 2)
        kept.v_BLGD[self._places] = v_BGSD.transpose(1, 2)
        seen = slice(0, self.num_seen)
        return kept.k_BLGD[:, seen].transpose(1, 2), kept.v_BLGD[:, seen].transpose(1, 2)

    @cached_property
    def _places(self) -> Any:
        """Index of the places of these tokens; one slice of all texts is copied the fastest."""
        rows, num_tokens = self.positions_BS.shape
        if self.even:
            return slice(None), slice(self.num_seen - num_tokens, self.num_seen)
        return torch.arange(rows, device=self.positions_BS.device).unsqueeze(1), self.positions_BS
