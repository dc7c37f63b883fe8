"""The engine that is examined, touched at its seam only.

Weights, gradients and moments are read and written as the checkpoint store does it, so a check
holds for every engine, layout and device. A gradient is what the first moment has of it after one
step from zero.
"""

import base64
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hlat.config.engine import Backend
from hlat.config.model import ScaledInit
from hlat.config.run import Config
from hlat.data.sequences import Sequences
from hlat.engine.create import create_engine
from hlat.engine.dtypes import DTYPES
from hlat.engine.interface import Engine, Numbers
from hlat.model.canonical import Kind, Parameter, parameters
from hlat.model.initialise import initial_values
from hlat.parallelism.group import tell

Whole = dict[str, NDArray[np.float32]]
"""Whole tensors by canonical name; on ranks that do not lead, none."""


@dataclass(frozen=True)
class Step:
    """What one step from zero moments has shown.

    Attributes:
        numbers: As `Engine.read` told them.
        gradients: Before clipping; on the leader.
    """

    numbers: Numbers
    gradients: Whole


class Patient:
    """An engine with a small model, and how checks ask and tell it things.

    All ranks call each method at the same time.
    """

    def __init__(self, config: Config, engine: Engine) -> None:
        """Build the model.

        Args:
            config: A shrunk configuration.
            engine: One that has joined the others, or will.
        """
        self.config, self.engine = config, engine
        engine.build(config)
        self.parameters = {one.name: one for one in parameters(config.model)}

    @property
    def rebuilds(self) -> bool:
        """Whether a process may build several models; neuronx-distributed knows one layout only."""
        return self.config.engine.name is Backend.native

    @property
    def leads(self) -> bool:
        """Whether this rank judges."""
        return self.engine.world.everyone.leads

    def tell(self, value: Any) -> Any:
        """The leader's value, as JSON knows it, on all ranks."""
        return tell(self.engine.world.everyone, value)

    @contextmanager
    def other(self, config: Config) -> "Iterator[Patient]":
        """Another engine of the same processes, with another configuration."""
        patient = Patient(config, create_engine(config))
        try:
            yield patient
        finally:
            patient.engine.close()

    def own(self, tokens: NDArray[np.int32]) -> Sequences:
        """The rows of a global batch that are this data-parallel rank's."""
        world = self.engine.world
        rows = np.ascontiguousarray(tokens[world.dp_rank :: world.dp_size])
        return Sequences(rows, np.zeros_like(rows))

    def train(self, tokens: NDArray[np.int32], rate: float) -> Numbers:
        """One step on a global batch."""
        return self.engine.read(self.engine.train_step(self.own(tokens), rate))

    def step(self, tokens: NDArray[np.int32], rate: float = 0.0) -> Step:
        """One step on a global batch from zero moments, with the gradients that it had."""
        self.forget()
        numbers = self.train(tokens, rate)
        assert numbers.grad_norm is not None
        clip = self.config.optimizer.grad_clip
        kept = min(1.0, clip / (numbers.grad_norm + 1e-6)) if clip else 1.0
        scale = np.float32(1 / (kept * (1 - self.config.optimizer.beta1)))
        moments = self.whole("exp_avg")
        return Step(numbers, {name: moment * scale for name, moment in moments.items()})

    def evaluate(self, tokens: NDArray[np.int32], documents: NDArray[np.int32]) -> float:
        """Mean loss of any sequences, the same on all ranks."""
        return self.engine.read(self.engine.eval_step(Sequences(tokens, documents))).loss

    @torch.no_grad()
    def forget(self) -> None:
        """Let the optimizer begin anew."""
        for chunk in self.engine.chunks():
            if not chunk.name.startswith("weights/"):
                chunk.tensor.zero_()

    @torch.no_grad()
    def fill(self, weights: Whole) -> None:
        """Give the model weights, whole ones on every rank."""
        for chunk in self.engine.chunks():
            kind, _, name = chunk.name.partition("/")
            if kind == "weights":
                ranges = zip(chunk.offset, chunk.size, strict=True)
                part = weights[name][tuple(slice(start, start + n) for start, n in ranges)]
                values = torch.from_numpy(np.ascontiguousarray(part))
                chunk.tensor.copy_(values.view(chunk.tensor.shape))

    def whole(self, kind: str) -> Whole:
        """All tensors of a kind, as the saved slices of all ranks tile them; on the leader."""
        pieces = []
        for chunk in self.engine.chunks():
            if chunk.saved and chunk.name.startswith(f"{kind}/"):
                values = chunk.tensor.detach().float().cpu().contiguous().numpy()
                name = chunk.name.partition("/")[2]
                content = base64.b64encode(values.tobytes()).decode()
                pieces.append([name, chunk.offset, chunk.size, content])
        told = self.engine.world.everyone.collect(pieces)
        found = self._nothing(kind) if self.leads else {}
        for name, offset, size, content in (piece for pieces in told for piece in pieces):
            ranges = zip(offset, size, strict=True)
            place = tuple(slice(start, start + n) for start, n in ranges)
            found[name][place] = np.frombuffer(base64.b64decode(content), np.float32).reshape(size)
        return found

    def _nothing(self, kind: str) -> Whole:
        """Tensors that nobody has told of: not a number of them is one."""
        shapes = {name: one.shape for name, one in self.parameters.items()}
        if kind == "updates":
            shapes = dict.fromkeys(shapes, ())
        return {name: np.full(shape, np.nan, np.float32) for name, shape in shapes.items()}

    def as_kept(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Values in the dtype in which weights are kept."""
        precision = self.config.precision
        dtype = DTYPES[precision.master_weights or precision.weights]
        return torch.from_numpy(values).to(dtype).float().numpy()

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """A folder beside the doctor's record, the same for all ranks, and gone afterwards."""
        root = Path(self.config.run.root).absolute()
        if not self.leads:
            yield Path(self.tell(None))
            self.engine.world.everyone.any(False)
            return
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=root) as made:
            self.tell(made)
            yield Path(made)
            self.engine.world.everyone.any(False)  # all have left it


def lively(config: Config, seed: int = 0) -> Whole:
    """Weights under which every part of the model matters.

    At its initial ones a model's attention is next to uniform and its logits next to zero, so that
    half of all mistakes would show in the last digits only. All values are ones of bf16, so that no
    recipe rounds them.
    """
    return {one.name: _lively(config, one, seed) for one in parameters(config.model)}


def _lively(config: Config, parameter: Parameter, seed: int) -> NDArray[np.float32]:
    model = replace(config.model, init_std=1.0, scaled_init=ScaledInit.none)
    shape = parameter.shape if len(parameter.shape) == 2 else (1, *parameter.shape)
    drawn = replace(parameter, shape=shape, kind=Kind.matrix)
    values = initial_values(drawn, model, config.run.seed + seed, (0, 0), shape)
    if parameter.kind is Kind.norm:
        values = (1 + values / 4)[0]
    elif "embed_tokens" not in parameter.name:
        values /= np.float32(math.sqrt(shape[1]))
    return torch.from_numpy(values).bfloat16().float().numpy()


def batch(config: Config, seed: int = 0) -> NDArray[np.int32]:
    """A global batch of random tokens."""
    size = (config.batch.global_batch_size, config.batch.sequence_length)
    lot = np.random.default_rng([config.run.seed, seed])
    return lot.integers(0, config.model.vocab_size, size, np.int32)
