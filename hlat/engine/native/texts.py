"""Texts that the model reads on: what layers keep of them, and what the head says at their ends.

Weights are those that training computes with, whatever the recipe. Tokens are cut over nobody:
under sequence parallelism each tensor-parallel rank has all of them, since a text may go on by a
single one. What the last stage of a pipeline finds, all its ranks are told.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hlat.engine.axis import Axis
from hlat.engine.native.pipeline import Passage
from hlat.engine.native.tensor_parallel import Regions
from hlat.model import prediction
from hlat.model.llama import Layer, Llama
from hlat.model.past import Kept, Past

_TOKENS_PER_PASS = 1024
"""On a CPU: enough for matrix products to run at full speed, and few enough for what one operator
gives to the next to stay in the cache, in memory that is used again and not fetched anew."""

_Layers = dict[int, dict[str, Kept]]
"""What this rank's layers keep, by number of the stage and name of the layer."""


@dataclass(frozen=True)
class Reader:
    """What reads texts on this rank: its stages, how tokens pass through them, and the others."""

    parts: Mapping[int, Llama]
    passage: Passage
    regions: Regions
    stages: Axis
    device: torch.device

    @property
    def head(self) -> Tensor:
        """The output head, on the ranks that have it."""
        return self.parts[max(self.parts)].head

    def rows_at_once(self, num_tokens: int) -> int:
        """How many texts go on together by so many tokens each."""
        if self.device.type != "cpu":
            return sys.maxsize
        return max(1, _TOKENS_PER_PASS // num_tokens)

    def on_device(self, array: NDArray[np.int64] | NDArray[np.int32]) -> Tensor:
        """A copy in the device's memory."""
        return torch.from_numpy(array).to(self.device, torch.int64)

    def tell(self, found: Tensor) -> NDArray[Any]:
        """What the last stage has found, on all; the others have zeros."""
        self.stages.sum_(found)
        return found.cpu().numpy()


def first_text(reader: Reader) -> "NativeTexts":
    """One text without tokens."""
    layers = {
        number: {name: _nothing(layer) for name, layer in part.layers.items()}
        for number, part in reader.parts.items()
    }
    return NativeTexts(reader, layers, np.zeros(1, np.int64), 0)


class NativeTexts:
    """The texts of hlat.engine.interface."""

    def __init__(
        self, reader: Reader, layers: _Layers, lengths: NDArray[np.int64], num_places: int
    ) -> None:
        self._reader, self._layers = reader, layers
        self._lengths, self._num_places = lengths, num_places
        self._counts = np.zeros_like(lengths)
        self._outputs: Tensor | None = None

    @torch.inference_mode()
    def select(self, rows: NDArray[np.int64], room: int) -> "NativeTexts":
        """Make texts that begin like some of these."""
        lengths = self._lengths[rows]
        used = int(lengths.max())
        index = self._reader.on_device(rows)
        layers = {
            number: {
                name: Kept(
                    _selected(kept.k_BLGD, index, used, room),
                    _selected(kept.v_BLGD, index, used, room),
                )
                for name, kept in stage.items()
            }
            for number, stage in self._layers.items()
        }
        return NativeTexts(self._reader, layers, lengths, used + room)

    @torch.inference_mode()
    def extend(self, tokens: NDArray[np.int32], counts: NDArray[np.int64]) -> None:
        """Read on in each text."""
        step = self._reader.rows_at_once(tokens.shape[1])
        some = [slice(begin, begin + step) for begin in range(0, len(tokens), step)]
        with self._reader.regions.unshared():
            found = [self._pass(rows, tokens[rows]) for rows in some]
        outputs = [each for each in found if each is not None]
        self._outputs = torch.cat(outputs) if outputs else None
        self._counts, self._lengths = counts, self._lengths + counts
        self._width = tokens.shape[1]

    def _pass(self, rows: slice, tokens: NDArray[np.int32]) -> Tensor | None:
        """Let some of the texts go on; what the head reads, where that is."""
        lengths, num_tokens = self._lengths[rows], tokens.shape[1]
        longest = int(lengths.max())
        num_seen, even = longest + num_tokens, longest == lengths.min()
        assert num_seen <= (self._num_places or num_tokens), "select has made no room for these"
        positions = self._reader.on_device(lengths[:, None] + np.arange(num_tokens))
        pasts = {
            number: Past(
                {name: kept.of(rows) for name, kept in layers.items()}, positions, num_seen, even
            )
            for number, layers in self._layers.items()
        }
        return self._reader.passage.extend(self._reader.on_device(tokens), pasts)

    @torch.inference_mode()
    def log_probs(
        self, rows: NDArray[np.int64], places: NDArray[np.int64], tokens: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Tell how likely tokens would be at some places."""
        asked, inverse = np.unique(rows * self._width + places, return_inverse=True)
        order = np.argsort(inverse, kind="stable")
        likely = torch.zeros(len(rows), device=self._reader.device)
        best = torch.zeros(len(asked), dtype=torch.int64, device=self._reader.device)
        if self._outputs is not None:
            likely, best = prediction.log_probs(
                self._outputs.flatten(0, 1)[self._reader.on_device(asked)],
                self._reader.head,
                torch.from_numpy(inverse[order]),
                self._reader.on_device(tokens[order]),
                self._reader.regions.vocabulary,
            )
        found = np.empty(len(rows), np.float32)
        found[order] = self._reader.tell(likely)
        return found, self._reader.tell(best)[inverse]

    @torch.inference_mode()
    def draw(
        self, rows: NDArray[np.int64], chances: NDArray[np.int64], temperature: float, top_p: float
    ) -> NDArray[np.int32]:
        """Draw the next token of texts."""
        drawn = torch.zeros(len(rows), dtype=torch.int64, device=self._reader.device)
        if self._outputs is not None:
            head, vocabulary = self._reader.head, self._reader.regions.vocabulary
            places = self._reader.on_device(rows * self._width + self._counts[rows] - 1)
            last = self._outputs.flatten(0, 1)[places]
            if temperature == 0:
                drawn = prediction.likeliest(last, head, vocabulary)
            else:
                given = self._reader.on_device(chances)
                drawn = prediction.draw(last, head, given, temperature, top_p, vocabulary)
        return self._reader.tell(drawn).astype(np.int32)


def _nothing(layer: torch.nn.Module) -> Kept:
    """What a layer has kept of one text without tokens."""
    assert isinstance(layer, Layer)
    attention = layer.self_attn
    weight, size = attention.qkv_proj.weight, attention.head_dim
    num_groups = len(weight) // ((attention.queries_per_group + 2) * size)
    return Kept(weight.new_empty(1, 0, num_groups, size), weight.new_empty(1, 0, num_groups, size))


def _selected(kept: Tensor, rows: Tensor, used: int, room: int) -> Tensor:
    """Texts' used places and some more, of which nobody sees what they hold."""
    made = kept.new_zeros((len(rows), used + room, *kept.shape[2:]))
    made[:, :used] = kept[rows, :used]
    return made
