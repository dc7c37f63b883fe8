"""Trains with PyTorch alone, on one process or many, on whatever device torch has."""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hlat import optimizer
from hlat.checkpoint.chunk import Chunk
from hlat.config.errors import ConfigError
from hlat.config.precision import Operator
from hlat.config.run import Config
from hlat.data.sequences import Sequences, counted_targets
from hlat.engine import copies, processes
from hlat.engine.dtypes import DTYPES
from hlat.engine.examination import Machinery, examine
from hlat.engine.interface import Disagreement, Examination, Numbers, World
from hlat.engine.native import fully_sharded
from hlat.engine.native.blocks import prepare_blocks
from hlat.engine.native.device import find_device, peak_memory, prepare_device
from hlat.engine.native.mesh import Mesh, join_world, leave_world
from hlat.engine.native.parts import make_parts
from hlat.engine.native.pipeline import Batch, Passage, Pipeline, Straight
from hlat.engine.native.tensor_parallel import Regions
from hlat.engine.native.texts import NativeTexts, Reader, first_text
from hlat.engine.native.weights import MOMENTS, Weights
from hlat.model.canonical import parameters
from hlat.model.canonical_views import views
from hlat.model.initialise import initial_values
from hlat.model.llama import Llama
from hlat.model.loss import IGNORED, head_loss, next_token_targets


class NativeEngine:
    """The engine of hlat.engine.interface."""

    world = World()
    device = ""

    def examine(self, config: Config) -> Examination:
        """Join the other processes; compute and add up what is known before memory is taken."""
        self._join(config)
        mesh, dtype = self._mesh, DTYPES[config.precision.compute]
        axes = {"tp": mesh.tp, "dp": mesh.dp, "pp": mesh.pp}
        return examine(config, Machinery(self._device, dtype, axes))

    def build(self, config: Config, trains: bool = True) -> None:
        """Join the other processes; make this one's part of the model, with its optimizer."""
        self._join(config)
        self._parameters = {parameter.name: parameter for parameter in parameters(config.model)}
        self._regions = Regions(self._mesh, config.model.vocab_size)
        self.parts, weights = make_parts(config, self._mesh, self._regions, self._device)
        for part in self.parts.values():
            prepare_blocks(part, config, self._device)
        self.weights = Weights(weights, config, self._mesh, trains)
        self._passage = self._make_passage()
        self._num_skipped = torch.zeros((), device=self._device)
        self._initialise()
        self._filled = True

    def train_step(self, sequences: Sequences, learning_rate: float) -> dict[str, Tensor]:
        """Run one optimizer step over all micro batches; nothing waits for the device."""
        assert self.weights.trains, "this engine was built with weights alone"
        self._refresh()
        scale = 1 / max(1, self._num_counted_by_all(sequences))
        loss = self._passage.backward(self._batch(sequences), scale)
        gradients = self.weights.gradients()
        loss, grad_norm = self._over_ranks(loss, self.weights.counted(gradients))
        optimizer.clip_([*gradients.values()], self.config.optimizer.grad_clip, grad_norm)
        skip = ~torch.isfinite(grad_norm)
        self.weights.update(learning_rate, skip)
        self._num_skipped += skip
        return {"loss": loss, "grad_norm": grad_norm}

    @torch.no_grad()
    def eval_step(self, sequences: Sequences) -> dict[str, Tensor]:
        """Measure the mean loss of some sequences, the same on every rank."""
        self._refresh()
        scale, dp = 1 / max(1, self._num_counted(sequences)), self._mesh.dp
        own = self._batch(sequences).share(dp.rank, dp.size)
        micro_batches = own.split(self.config.micro_batch_size)
        loss = torch.stack([self._passage.forward(micro, scale) for micro in micro_batches]).sum()
        self._mesh.pp.sum_(loss)
        dp.sum_(loss)
        fully_sharded.release(self.parts.values())
        return {"loss": loss}

    def texts(self) -> NativeTexts:
        """One text without tokens, from which all others are made.

        Raises:
            ConfigError: No rank holds whole layers.
        """
        if self.weights.shared:
            raise ConfigError(
                f"parallelism.zero={self.config.parallelism.zero} leaves no data-parallel rank a "
                "whole layer to read texts with; set parallelism.zero=1 or 0, any checkpoint fits"
            )
        self._refresh()
        reader = Reader(self.parts, self._passage, self._regions, self._mesh.pp, self._device)
        return first_text(reader)

    def read(self, pending: dict[str, Tensor]) -> Numbers:
        """Wait for the device and fetch the numbers; all ranks do so together."""
        loss = pending["loss"]
        if "grad_norm" not in pending:
            return Numbers(loss.item())
        updated = self.weights.counted(self.weights.updated)
        _, param_norm = self._over_ranks(loss, updated)
        numbers = torch.stack([loss, pending["grad_norm"], param_norm, self._num_skipped])
        mean_loss, *norms, num_skipped = numbers.tolist()
        return Numbers(mean_loss, norms[0], norms[1], int(num_skipped))

    def peak_memory(self) -> int | None:
        """The most that this process has ever held of its device's memory."""
        return peak_memory(self._device)

    def chunks(self) -> Iterator[Chunk]:
        """Weights, both moments, and the count of updates of what this rank updates.

        Of a recipe with master weights these are the weights: from them follow the others. An
        engine that does not train has neither them nor the rest.
        """
        self._filled = True
        for name, weight in self.weights.updated.items():
            yield from self._chunks("weights", name, weight)
            if not self.weights.trains:
                continue
            state = self.weights.state(name)
            for kind in MOMENTS:
                yield from self._chunks(kind, name, state[kind])
            for chunk in self._chunks("updates", name, weight):
                first = chunk.saved and not any(chunk.offset)
                yield Chunk(chunk.name, (), (), (), state["step"], first)

    def compare_copies(self) -> list[Disagreement]:
        """What of the state data-parallel or tensor-parallel ranks hold, and not alike."""
        return copies.compare(self.chunks(), (self._mesh.dp, self._mesh.tp))

    def close(self) -> None:
        """Release the model and its optimizer, and leave the other processes."""
        if hasattr(self, "weights"):
            self.weights.close()
        for name in ("parts", "weights", "_passage"):
            vars(self).pop(name, None)
        if self._joined:
            leave_world()

    def _join(self, config: Config) -> None:
        """Find the device and meet the other processes, unless that was done before."""
        if self.device:
            return
        self.config = config
        place = processes.place()
        number = place.rank if config.num_processes > 1 else 0
        self._device = find_device(config, place.local_rank)
        prepare_device(config, self._device)
        self._joined = join_world(number, config.num_processes, self._device)
        self._mesh = Mesh(config, number)
        self.world, self.device = self._mesh.world, str(self._device)

    def _make_passage(self) -> Passage:
        if self._mesh.pp.size > 1:
            return Pipeline(self.parts, self.config, self._mesh.pp, self._loss)
        return Straight(self.parts[0], self.config.micro_batch_size, self._loss)

    @torch.no_grad()
    def _initialise(self) -> None:
        for name, weight in self.weights.updated.items():
            for chunk in self._chunks("weights", name, weight):
                parameter = self._parameters[chunk.name.removeprefix("weights/")]
                values = initial_values(
                    parameter, self.config.model, self.config.run.seed, chunk.offset, chunk.size
                )
                chunk.tensor.copy_(torch.from_numpy(values).view(chunk.tensor.shape))

    def _refresh(self) -> None:
        """Let the weights follow a state that was filled in from outside."""
        if self._filled:
            self.weights.refresh()
            self._filled = False

    def _batch(self, sequences: Sequences) -> Batch:
        """Sequences on the device; each option decides who hears of documents."""
        data = self.config.data
        tokens = self._on_device(sequences.tokens)
        documents = None
        if data.document_mask or data.loss_mask:
            assert sequences.documents is not None
            documents = self._on_device(sequences.documents)
        targets = next_token_targets(tokens, documents if data.loss_mask else None)
        if sequences.num_counted is not None:
            targets[:, sequences.num_counted :] = IGNORED
        return Batch(tokens, documents if data.document_mask else None, targets)

    def _on_device(self, array: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def _loss(self, part: Llama, outputs: Tensor, targets: Tensor, scale: float) -> Tensor:
        """Scaled sum of the loss of a micro batch."""
        fp32 = Operator.loss in self.config.precision.fp32_operators
        compiled = self.config.compiler.inductor
        inputs, vocabulary = self._regions.enter(outputs), self._regions.vocabulary
        return head_loss(inputs, part.head, targets, scale, fp32, compiled, vocabulary)

    def _num_counted(self, sequences: Sequences) -> int:
        """Terms of the loss over some sequences, known without asking the device.

        Micro batches differ in how many documents they join, so the mean of their means would not
        be the mean of the batch.
        """
        return int(counted_targets(sequences, self.config.data.loss_mask).sum())

    def _num_counted_by_all(self, sequences: Sequences) -> int:
        """The same over the sequences of all data-parallel ranks."""
        own = self._num_counted(sequences)
        if not self.config.data.loss_mask:
            return own * self._mesh.dp.size
        counted = torch.tensor(own)
        self._mesh.dp.sum_(counted)
        return int(counted)

    def _over_ranks(self, loss: Tensor, tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The sum of a loss, and the norm of tensors of which each rank counts its own."""
        if self._mesh.size == 1:
            return loss, optimizer.global_norm(tensors)
        square = optimizer.global_norm(tensors).square() if tensors else torch.zeros_like(loss)
        both = torch.stack([loss if self._mesh.tp.rank == 0 else torch.zeros_like(loss), square])
        self._mesh.sum_(both)
        return both[0], both[1].sqrt()

    def _chunks(self, kind: str, name: str, tensor: Tensor) -> Iterator[Chunk]:
        """The canonical parts of a tensor of what the weights keep of a parameter."""
        shard, counts = self.weights.shards[name], self.weights.counts(name)
        for rows, view, begin in views(shard.rows, tensor):
            across = () if shard.columns is None else (shard.columns,)
            offset = (rows.first, *(first for first, _ in across))
            size = (rows.count, *(count for _, count in across))
            shape = self._parameters[rows.name].shape
            saved = counts and begin < shard.num_owned
            yield Chunk(f"{kind}/{rows.name}", shape, offset, size, view, saved)
