"""Forward and backward passes over micro batches, on one stage or in torch's pipeline schedules.

All pipeline ranks have the tokens, so stages exchange only activations and their gradients.
torch.distributed.pipelining implements the schedules and the communication. It is imported when it
is used, since this takes as long as torch's import.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hlat.config.parallelism import ParallelismConfig, PipelineSchedule
from hlat.config.run import Config
from hlat.distributed.mesh_axis import MeshAxis
from hlat.model.decoder import Decoder
from hlat.model.kv_cache import KVCache
from hlat.model.loss import IGNORE_INDEX
from hlat.precision.torch_dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

LossFn = Callable[[Decoder, Tensor, Tensor, float | None], Tensor]
"""Returns the scaled sum of the loss, given the last model part, its output, targets and scale.

If scale is None, it returns the loss of each token, [n, S].
"""


@dataclass(frozen=True)
class DeviceBatch:
    """Sequences on the device, all [n, S]; without document ids attention has no document mask."""

    tokens: Tensor
    documents: Tensor | None
    targets: Tensor

    def shard(self, rank: int, size: int) -> "DeviceBatch":
        """Return every `size`-th sequence from `rank` on, equally many on all ranks.

        Shards are padded with the first sequence with ignored targets.
        """
        if size == 1:
            return self
        return self._select(rank, size, -(-len(self.tokens) // size))

    def pad(self, multiple: int) -> "DeviceBatch":
        """Pad to a multiple of sequences with the first sequence with ignored targets."""
        return self._select(0, 1, -(-len(self.tokens) // multiple) * multiple)

    def _select(self, start: int, step: int, count: int) -> "DeviceBatch":
        index = start + step * torch.arange(count, device=self.tokens.device)
        is_padding = index >= len(self.tokens)
        index = index.where(~is_padding, 0)
        targets = self.targets[index].masked_fill(is_padding.unsqueeze(1), IGNORE_INDEX)
        documents = None if self.documents is None else self.documents[index]
        return DeviceBatch(self.tokens[index], documents, targets)

    def split(self, size: int) -> "list[DeviceBatch]":
        """Split into micro batches; the last one may be smaller."""
        tokens, targets = torch.split(self.tokens, size), torch.split(self.targets, size)
        documents: Sequence[Tensor | None] = [None] * len(tokens)
        if self.documents is not None:
            documents = torch.split(self.documents, size)
        return [DeviceBatch(*each) for each in zip(tokens, documents, targets, strict=True)]


class SequentialRunner:
    """Passes of micro batches, one after the other, through a model with all layers."""

    def __init__(self, model: Decoder, loss_fn: LossFn) -> None:
        self._model, self._loss_fn = model, loss_fn

    def backward(self, batch: DeviceBatch, micro_batch_size: int, scale: float) -> Tensor:
        """Accumulate gradients over all micro batches of a step.

        Returns:
            The scaled sum of their loss on the ranks with the head, 0 on the others.
        """
        total = torch.zeros((), device=batch.tokens.device)
        for micro_batch in batch.split(micro_batch_size):
            loss = self.forward(micro_batch, scale)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def forward(self, micro_batch: DeviceBatch, scale: float | None) -> Tensor:
        """Return the loss of one micro batch of any size, as `LossFn`."""
        outputs = self._model(micro_batch.tokens, micro_batch.documents)
        return self._loss_fn(self._model, outputs, micro_batch.targets, scale)

    def forward_with_cache(self, tokens: Tensor, kv_caches: Mapping[int, KVCache]) -> Tensor:
        """Run the model on the next tokens of each sequence, given the KV cache of each stage.

        Returns:
            The input of the output head, [n, s, H]; None on ranks without the head.
        """
        outputs: Tensor = self._model(tokens, None, None, kv_caches[0])
        return outputs


class PipelineRunner:
    """Passes of micro batches through the pipeline stages of all ranks, given this rank's parts."""

    def __init__(
        self, model_parts: Mapping[int, Decoder], config: Config, axis: MeshAxis, loss_fn: LossFn
    ) -> None:
        layout = config.parallelism
        self._config, self._axis = config, axis
        self._model_parts, self._loss_fn = model_parts, loss_fn
        self._last_stage = layout.pp * layout.stages_per_rank - 1
        self._scale = 1.0
        self._schedules: dict[tuple[int, ...], Any] = {}

    def backward(self, batch: DeviceBatch, micro_batch_size: int, scale: float) -> Tensor:
        """Accumulate gradients over all micro batches in the order of the schedule."""
        self._scale = scale
        losses: list[Tensor] = []
        inputs = {"tokens": batch.tokens}
        if batch.documents is not None:
            inputs["documents"] = batch.documents
        has_head = self._last_stage in self._model_parts
        schedule = self._get_schedule(batch.tokens.shape, micro_batch_size)
        schedule.step(
            **inputs,
            target=batch.targets if has_head else None,
            losses=losses if has_head else None,
            return_outputs=False,
        )
        total = torch.zeros((), device=batch.tokens.device)
        for loss in losses:
            total += loss.detach()
        return total

    def forward(self, micro_batch: DeviceBatch, scale: float | None) -> Tensor:
        """Return the loss of one micro batch, as `LossFn`, on the rank with the head; others 0.

        Ranks do not wait for later stages.
        """
        tokens, targets = micro_batch.tokens, micro_batch.targets
        shape = _compute_boundary_shape(tokens.shape, self._config)
        y = self._run_stages(shape, tokens, micro_batch.documents, {})
        if y is None:
            return torch.zeros(() if scale is not None else tokens.shape, device=tokens.device)
        return self._loss_fn(self._model_parts[self._last_stage], y, targets, scale)

    def forward_with_cache(self, tokens: Tensor, kv_caches: Mapping[int, KVCache]) -> Tensor | None:
        """Run the stages on the next tokens; activations are not sharded over tokens."""
        shape = (*tokens.shape, self._config.model.hidden_size)
        return self._run_stages(shape, tokens, None, kv_caches)

    def _get_schedule(self, shape: torch.Size, micro_batch_size: int) -> Any:
        """Return torch's schedule for a step of `shape`, which batch.ramp and warm-up change."""
        key = (*shape, micro_batch_size)
        if key not in self._schedules:
            build = _select_schedule(self._config.parallelism, shape[0] // micro_batch_size)
            stages = self._build_stages((micro_batch_size, shape[1]))
            self._schedules[key] = build(stages, loss_fn=self._compute_loss, scale_grads=False)
        return self._schedules[key]

    def _build_stages(self, shape: tuple[int, int]) -> "list[PipelineStage]":
        """Return torch's stages of this rank for micro batches of `shape`."""
        from hlat.engine.native.pipeline_stage import TransientBufferStage

        device = next(next(iter(self._model_parts.values())).parameters()).device
        activation = torch.empty(
            _compute_boundary_shape(shape, self._config),
            dtype=TORCH_DTYPES[self._config.precision.compute_dtype],
            device="meta",
            requires_grad=True,  # the stages send its gradient back
        )
        return [
            TransientBufferStage(
                _PipelineStageModule(part),
                stage,
                self._last_stage + 1,
                activation,
                device=device,
                group=self._axis.group,
            )
            for stage, part in self._model_parts.items()
        ]

    def _run_stages(
        self,
        shape: tuple[int, ...],
        tokens: Tensor,
        documents: Tensor | None,
        kv_caches: Mapping[int, KVCache],
    ) -> Tensor | None:
        """Exchange activations of a shape; return the output of the last stage on its rank."""
        for stage, part in self._model_parts.items():
            x = None
            if stage > 0:
                dtype = TORCH_DTYPES[self._config.precision.compute_dtype]
                x = torch.empty(shape, dtype=dtype, device=tokens.device)
                dist.recv(x, self._get_stage_rank(stage - 1), group=self._axis.group)
            y: Tensor = part(tokens, documents, x, kv_caches.get(stage))
            if stage == self._last_stage:
                return y
            dist.send(y.contiguous(), self._get_stage_rank(stage + 1), group=self._axis.group)
        return None

    def _get_stage_rank(self, stage: int) -> int:
        return self._axis.ranks[stage % self._axis.size]

    def _compute_loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return self._loss_fn(self._model_parts[self._last_stage], output, targets, self._scale)


MicroBatchRunner = SequentialRunner | PipelineRunner


class _PipelineStageModule(nn.Module):
    """A model part with the calling convention of torch's schedules."""

    def __init__(self, part: Decoder) -> None:
        super().__init__()
        self.part = part

    def forward(self, *received: Tensor, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        y: Tensor = self.part(tokens, documents, *received)
        return y


def _select_schedule(layout: ParallelismConfig, num_micro_batches: int) -> Callable[..., Any]:
    """Return a function that builds torch's schedule from a rank's stages."""
    from torch.distributed.pipelining import schedules

    if layout.pipeline_schedule is PipelineSchedule.one_f_one_b:
        # torch's 1F1B rejects fewer micro batches than stages, for which it equals GPipe
        is_short = num_micro_batches < layout.pp
        single = schedules.ScheduleGPipe if is_short else schedules.Schedule1F1B
        return lambda stages, **kwargs: single(stages[0], num_micro_batches, **kwargs)
    multi = {
        PipelineSchedule.interleaved: schedules.ScheduleInterleaved1F1B,
        PipelineSchedule.zero_bubble: schedules.ScheduleInterleavedZeroBubble,
    }[layout.pipeline_schedule]
    return partial(multi, n_microbatches=num_micro_batches)


def _compute_boundary_shape(shape: Sequence[int], config: Config) -> tuple[int, int, int]:
    """Return the shape of the activation between stages of micro batches with a shape."""
    num_token_shards = config.parallelism.tp if config.parallelism.sequence_parallel else 1
    return shape[0], shape[1] // num_token_shards, config.model.hidden_size
