"""Trains on one process with PyTorch alone, on whatever device torch has.

The device is a string from the configuration or torch's own answer, so the same code serves a CPU,
a GPU and Trainium 2.
"""

import os
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hlat import compiler, optimizer
from hlat.checkpoint.chunk import Chunk
from hlat.config.errors import ConfigError
from hlat.config.precision import Operator, Rounding
from hlat.config.run import Config
from hlat.data.sequences import Sequences, counted_targets
from hlat.engine.interface import Numbers, World
from hlat.engine.native.blocks import prepare_blocks
from hlat.engine.native.weights import DTYPES, MOMENTS, Weights
from hlat.model.canonical import parameters
from hlat.model.canonical_views import canonical_views
from hlat.model.initialise import initial_values
from hlat.model.llama import Llama
from hlat.model.loss import head_loss, next_token_targets
from hlat.precision import rounds_by_itself


class NativeEngine:
    """The engine of hlat.engine.interface on one process."""

    world = World()

    def build(self, config: Config) -> None:
        """Make the model on the device, initialised, with its optimizer."""
        self.config = config
        self._device = _device(config.engine.device)
        self.device = str(self._device)
        os.environ.update(device_environment(config, self._device.type))
        if config.engine.deterministic:
            # torch's notes on reproducibility ask for it
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.set_deterministic_debug_mode("error" if config.engine.deterministic else "default")
        # A debugging aid of that mode; writing all memory once more is 6% of a step on a CPU
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        with torch.device("meta"):
            model = Llama(config.model, Operator.norm in config.precision.fp32_operators)
        dtype = DTYPES[config.precision.weights]
        self.model = model.to(dtype).to_empty(device=self._device)
        prepare_blocks(self.model, config, self._device)
        self._parameters = {parameter.name: parameter for parameter in parameters(config.model)}
        self.weights = Weights(self.model, config)
        self._initialise()
        self._filled = True

    def train_step(self, sequences: Sequences, learning_rate: float) -> dict[str, Tensor]:
        """Run one optimizer step over all micro batches; nothing waits for the device."""
        self._refresh()
        loss = self._backward(sequences)
        gradients = self.weights.gradients()
        grad_norm = optimizer.global_norm(gradients)
        optimizer.clip_(gradients, self.config.optimizer.grad_clip, grad_norm)
        self.weights.update(learning_rate)
        return {"loss": loss, "grad_norm": grad_norm}

    @torch.no_grad()
    def eval_step(self, sequences: Sequences) -> dict[str, Tensor]:
        """Measure the mean loss of some sequences."""
        self._refresh()
        scale = 1 / self._num_counted(sequences)
        losses = [self._loss(*micro, scale) for micro in self._micro_batches(sequences)]
        return {"loss": torch.stack(losses).sum()}

    def read(self, pending: dict[str, Tensor]) -> Numbers:
        """Wait for the device and fetch the numbers."""
        if "grad_norm" not in pending:
            return Numbers(pending["loss"].item())
        param_norm = optimizer.global_norm(self.weights.updated.values())
        return Numbers(*torch.stack([pending["loss"], pending["grad_norm"], param_norm]).tolist())

    def chunks(self) -> Iterator[Chunk]:
        """Weights, both moments, and the count of updates of every canonical parameter.

        Of a recipe with master weights these are the weights: from them follow the others.
        """
        self._filled = True
        updated = self.weights.updated
        yield from self._chunks("weights", updated)
        for moment in MOMENTS:
            yield from self._chunks(
                moment, {name: self.weights.state(name)[moment] for name in updated}
            )
        for name, weight in updated.items():
            updates = self.weights.state(name)["step"]
            for canonical, _ in canonical_views(self.config.model, {name: weight}):
                yield Chunk(f"updates/{canonical}", (), (), (), updates)

    def close(self) -> None:
        """Release the model and its optimizer."""
        del self.model, self.weights

    @torch.no_grad()
    def _initialise(self) -> None:
        for name, view in canonical_views(self.config.model, self.weights.updated):
            parameter = self._parameters[name]
            whole = (0,) * len(parameter.shape)
            values = initial_values(
                parameter, self.config.model, self.config.run.seed, whole, parameter.shape
            )
            view.copy_(torch.from_numpy(values).view(view.shape))

    def _refresh(self) -> None:
        """Let the weights follow a state that was filled in from outside."""
        if self._filled:
            self.weights.refresh()
            self._filled = False

    def _backward(self, sequences: Sequences) -> Tensor:
        """Add up the gradient of the mean loss over all micro batches; return that loss."""
        scale = 1 / self._num_counted(sequences)
        total = torch.zeros((), device=self._device)
        for micro in self._micro_batches(sequences):
            loss = self._loss(*micro, scale)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def _micro_batches(self, sequences: Sequences) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Cut into micro batches on the device; the last one may be smaller."""
        data, size = self.config.data, self.config.batch.micro_batch_size
        tokens = torch.split(self._on_device(sequences.tokens), size)
        if not (data.document_mask or data.loss_mask):
            return ((micro, None) for micro in tokens)
        assert sequences.documents is not None
        return zip(tokens, torch.split(self._on_device(sequences.documents), size), strict=True)

    def _on_device(self, array: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def _loss(self, tokens: Tensor, documents: Tensor | None, scale: float) -> Tensor:
        """Scaled sum of the loss of a micro batch; each option decides who hears of documents."""
        data = self.config.data
        fp32 = Operator.loss in self.config.precision.fp32_operators
        outputs = self.model(tokens, documents if data.document_mask else None)
        targets = next_token_targets(tokens, documents if data.loss_mask else None)
        compiled = self.config.compiler.inductor
        return head_loss(outputs, self.model.head, targets, scale, fp32, compiled)

    def _num_counted(self, sequences: Sequences) -> int:
        """Terms of the loss over all sequences, known without asking the device; at least 1.

        Micro batches differ in how many documents they join, so the mean of their means would not
        be the mean of the batch.
        """
        return max(1, int(counted_targets(sequences, self.config.data.loss_mask).sum()))

    def _chunks(self, kind: str, tensors: dict[str, Tensor]) -> Iterator[Chunk]:
        for name, view in canonical_views(self.config.model, tensors):
            shape = self._parameters[name].shape
            yield Chunk(f"{kind}/{name}", shape, (0,) * len(shape), shape, view)


def device_environment(config: Config, device_type: str) -> dict[str, str]:
    """The variables that compiler and recipe want set before the device is used.

    Raises:
        ConfigError: The hardware is to round stochastically, and no SDK is pinned to tell it so.
    """
    variables = compiler.environment(config.compiler, config.precision)
    stochastic = config.precision.rounding is Rounding.stochastic
    if stochastic and rounds_by_itself(device_type) and not variables:
        raise ConfigError(
            f"precision.rounding=stochastic is the hardware's on engine.device={device_type}, and "
            "compiler.neuron_sdk=null sets no mode; use compiler=neuron_2_33 or another pin"
        )
    return variables


def _device(name: str) -> torch.device:
    """Return the named device, or for `auto` the machine's accelerator, or the cpu.

    Raises:
        ConfigError: The name is no device of this machine.
    """
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    if name == "auto":
        return accelerator or torch.device("cpu")
    here = sorted({"cpu"} | ({accelerator.type} if accelerator else set()))
    if name.partition(":")[0] not in here:
        raise ConfigError(
            f"engine.device={name} is not on this machine; use auto or {' or '.join(here)}"
        )
    return torch.device(name)
