"""How micro batches pass through the layers: on one rank, or on several in torch's schedules.

In a pipeline tokens are everywhere, so only what flows between layers is sent. The schedules, their
sends and receives are torch.distributed.pipelining's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from hlat.config.parallelism import Parallelism, PipelineSchedule
from hlat.config.run import Config
from hlat.engine.axis import Axis
from hlat.engine.dtypes import DTYPES
from hlat.model.llama import Llama
from hlat.model.loss import IGNORED
from hlat.model.past import Past

Loss = Callable[[Llama, Tensor, Tensor, float], Tensor]
"""Scaled sum of the loss: of the last part, what it gave, the targets and the scale."""


@dataclass(frozen=True)
class Batch:
    """Sequences on the device.

    Attributes:
        tokens: [n, S].
        documents: What attention is to know of documents, [n, S]; None: nothing.
        targets: [n, S].
    """

    tokens: Tensor
    documents: Tensor | None
    targets: Tensor

    def share(self, rank: int, size: int) -> "Batch":
        """Every `size`-th sequence from the `rank`-th on; all ranks have equally many.

        Where sequences are missing, the first stands in, and its loss does not count.
        """
        if size == 1:
            return self
        index = rank + size * torch.arange(-(-len(self.tokens) // size), device=self.tokens.device)
        missing = index >= len(self.tokens)
        index = index.where(~missing, 0)
        targets = self.targets[index].masked_fill(missing.unsqueeze(1), IGNORED)
        documents = None if self.documents is None else self.documents[index]
        return Batch(self.tokens[index], documents, targets)

    def split(self, size: int) -> "list[Batch]":
        """Cut into micro batches; the last one may be smaller."""
        tokens, targets = torch.split(self.tokens, size), torch.split(self.targets, size)
        documents: Sequence[Tensor | None] = [None] * len(tokens)
        if self.documents is not None:
            documents = torch.split(self.documents, size)
        return [Batch(*each) for each in zip(tokens, documents, targets, strict=True)]


class Passage(Protocol):
    """How micro batches pass through all layers."""

    def backward(self, batch: Batch, scale: float) -> Tensor:
        """Add up gradients over all micro batches of a step.

        Returns:
            The scaled sum of their loss, on the ranks that have the head; 0 on the others.
        """

    def forward(self, micro: Batch, scale: float) -> Tensor:
        """The same loss of one micro batch of any size, without gradients."""

    def extend(self, tokens: Tensor, pasts: Mapping[int, Past]) -> Tensor | None:
        """Let texts go on, without gradients.

        Args:
            tokens: [n, s].
            pasts: What the layers of each of this rank's stages have kept of what is before them.

        Returns:
            What the head reads at these tokens, [n, s, H]; None on ranks that do not have it.
        """


class Straight:
    """All layers on this rank."""

    def __init__(self, model: Llama, micro_batch_size: int, loss: Loss) -> None:
        self._model, self._micro_batch_size, self._loss = model, micro_batch_size, loss

    def backward(self, batch: Batch, scale: float) -> Tensor:
        """One micro batch after the other."""
        total = torch.zeros((), device=batch.tokens.device)
        for micro in batch.split(self._micro_batch_size):
            loss = self.forward(micro, scale)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def forward(self, micro: Batch, scale: float) -> Tensor:
        """All layers and the head."""
        outputs = self._model(micro.tokens, micro.documents)
        return self._loss(self._model, outputs, micro.targets, scale)

    def extend(self, tokens: Tensor, pasts: Mapping[int, Past]) -> Tensor:
        """All layers."""
        outputs: Tensor = self._model(tokens, None, None, pasts[0])
        return outputs


class Pipeline:
    """This rank's stages among those of the ranks before and after it."""

    def __init__(self, parts: Mapping[int, Llama], config: Config, axis: Axis, loss: Loss) -> None:
        """Join the stages of all ranks.

        Args:
            parts: This rank's, by number of the stage.
            config: Layout, batch and recipe.
            axis: The pipeline's ranks.
            loss: Of the last stage.
        """
        layout = config.parallelism
        self._axis, self._parts, self._loss = axis, parts, loss
        self._last = layout.pp * layout.stages_per_rank - 1
        self._scale = 1.0
        self._between = _between(config)
        device = next(next(iter(parts.values())).parameters()).device
        stages = [
            PipelineStage(
                _Stage(part),
                number,
                self._last + 1,
                device,
                input_args=() if number == 0 else (self._between,),
                output_args=(self._between,),
                group=axis.group,
            )
            for number, part in parts.items()
        ]
        settings = {"loss_fn": self._loss_of, "scale_grads": False}
        self._schedule = _schedule(layout, config.num_micro_batches)(stages, **settings)

    def backward(self, batch: Batch, scale: float) -> Tensor:
        """All micro batches, in the order of the schedule."""
        self._scale = scale
        losses: list[Tensor] = []
        inputs = {"tokens": batch.tokens}
        if batch.documents is not None:
            inputs["documents"] = batch.documents
        reads = self._last in self._parts
        self._schedule.step(
            **inputs,
            target=batch.targets if reads else None,
            losses=losses if reads else None,
            return_outputs=False,
        )
        total = torch.zeros((), device=batch.tokens.device)
        for loss in losses:
            total += loss.detach()
        return total

    def forward(self, micro: Batch, scale: float) -> Tensor:
        """Stage after stage; a rank goes on with the next micro batch when it has sent one on."""
        size = (len(micro.tokens), *self._between.shape[1:])
        for number, part in self._parts.items():
            x = self._receive(number, size, micro.tokens.device) if number > 0 else None
            y = part(micro.tokens, micro.documents, x)
            if number == self._last:
                return self._loss(part, y, micro.targets, scale)
            dist.send(y.contiguous(), self._rank_of(number + 1), group=self._axis.group)
        return torch.zeros((), device=micro.tokens.device)

    def extend(self, tokens: Tensor, pasts: Mapping[int, Past]) -> Tensor | None:
        """Stage after stage; what is sent on are all of the tokens, never a share of them."""
        size = (*tokens.shape, self._between.shape[-1])
        for number, part in self._parts.items():
            x = self._receive(number, size, tokens.device) if number > 0 else None
            y: Tensor = part(tokens, None, x, pasts[number])
            if number == self._last:
                return y
            dist.send(y.contiguous(), self._rank_of(number + 1), group=self._axis.group)
        return None

    def _receive(self, number: int, size: tuple[int, ...], device: torch.device) -> Tensor:
        x = torch.empty(size, dtype=self._between.dtype, device=device)
        dist.recv(x, self._rank_of(number - 1), group=self._axis.group)
        return x

    def _rank_of(self, stage: int) -> int:
        return self._axis.ranks[stage % self._axis.size]

    def _loss_of(self, output: Tensor, targets: Tensor) -> Tensor:
        return self._loss(self._parts[self._last], output, targets, self._scale)


class _Stage(nn.Module):
    """A part as torch's schedules call it: what was received, then what all have."""

    def __init__(self, part: Llama) -> None:
        super().__init__()
        self.part = part

    def forward(self, *received: Tensor, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        y: Tensor = self.part(tokens, documents, *received)
        return y


def _schedule(layout: Parallelism, num_micro_batches: int) -> Callable[..., Any]:
    """What makes torch's schedule of a rank's stages."""
    if layout.pipeline_schedule is PipelineSchedule.one_f_one_b:
        # With fewer micro batches than stages 1F1B is GPipe, and torch knows it by that name only
        few = num_micro_batches < layout.pp
        single = schedules.ScheduleGPipe if few else schedules.Schedule1F1B
        return lambda stages, **settings: single(stages[0], num_micro_batches, **settings)
    several = {
        PipelineSchedule.interleaved: schedules.ScheduleInterleaved1F1B,
        PipelineSchedule.zero_bubble: schedules.ScheduleInterleavedZeroBubble,
    }[layout.pipeline_schedule]
    return partial(several, n_microbatches=num_micro_batches)


def _between(config: Config) -> Tensor:
    """What one stage gives to the next for a micro batch, without its content."""
    layout, batch = config.parallelism, config.batch
    shares = layout.tp if layout.sequence_parallel else 1
    size = (config.micro_batch_size, batch.sequence_length // shares, config.model.hidden_size)
    dtype = DTYPES[config.precision.compute]
    # That it requires a gradient tells the stages to send one back
    return torch.empty(size, dtype=dtype, device="meta", requires_grad=True)
