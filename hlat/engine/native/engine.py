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

from hlat import optimizer
from hlat.checkpoint.chunk import Chunk
from hlat.config.errors import ConfigError
from hlat.config.precision import Dtype
from hlat.config.run import Config
from hlat.data.sequences import Sequences, counted_targets
from hlat.engine.interface import Numbers, World
from hlat.model.canonical import parameters
from hlat.model.canonical_views import canonical_views
from hlat.model.initialise import initial_values
from hlat.model.llama import Llama, next_token_loss

_DTYPES = {Dtype.fp32: torch.float32, Dtype.bf16: torch.bfloat16}
_MOMENTS = ("exp_avg", "exp_avg_sq")


class NativeEngine:
    """The engine of hlat.engine.interface on one process."""

    world = World()

    def build(self, config: Config) -> None:
        """Make the model on the device, initialised, with its optimizer."""
        self.config = config
        self._device = _device(config.engine.device)
        self.device = str(self._device)
        if config.engine.deterministic:
            # torch's notes on reproducibility ask for it
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.set_deterministic_debug_mode("error" if config.engine.deterministic else "default")
        # A debugging aid of that mode; writing all memory once more is 6% of a step on a CPU
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        with torch.device("meta"):
            self.model = Llama(config.model)
        self.model = self.model.to(_DTYPES[config.precision.weights]).to_empty(device=self._device)
        self._parameters = {parameter.name: parameter for parameter in parameters(config.model)}
        self._initialise()
        self.optimizer = optimizer.build(config.optimizer, self.model.parameters())
        self._make_moments()

    def train_step(self, sequences: Sequences, learning_rate: float) -> dict[str, Tensor]:
        """Run one optimizer step over all micro batches; nothing waits for the device."""
        loss = self._accumulate_gradients(sequences)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        grad_norm = optimizer.global_norm(gradients)
        optimizer.clip_(gradients, self.config.optimizer.grad_clip, grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"loss": loss, "grad_norm": grad_norm}

    @torch.no_grad()
    def eval_step(self, sequences: Sequences) -> dict[str, Tensor]:
        """Measure the mean loss of some sequences."""
        losses = [self._loss(*micro) for micro in self._micro_batches(sequences)]
        return {"loss": torch.stack(losses).sum() / self._num_counted(sequences)}

    def read(self, pending: dict[str, Tensor]) -> Numbers:
        """Wait for the device and fetch the numbers."""
        if "grad_norm" not in pending:
            return Numbers(pending["loss"].item())
        param_norm = optimizer.global_norm([p.detach() for p in self.model.parameters()])
        return Numbers(*torch.stack([pending["loss"], pending["grad_norm"], param_norm]).tolist())

    def chunks(self) -> Iterator[Chunk]:
        """Weights, both moments, and the count of updates of every canonical parameter."""
        weights = dict(self.model.named_parameters())
        yield from self._chunks(
            "weights", {name: weight.detach() for name, weight in weights.items()}
        )
        for moment in _MOMENTS:
            moments = {
                name: self.optimizer.state[weight][moment] for name, weight in weights.items()
            }
            yield from self._chunks(moment, moments)
        for name, weight in weights.items():
            updates = self.optimizer.state[weight]["step"]
            for canonical, _ in canonical_views(self.config.model, {name: weight}):
                yield Chunk(f"updates/{canonical}", (), (), (), updates)

    def close(self) -> None:
        """Release the model and its optimizer."""
        del self.model, self.optimizer

    def _initialise(self) -> None:
        with torch.no_grad():
            for name, view in canonical_views(
                self.config.model, dict(self.model.named_parameters())
            ):
                parameter = self._parameters[name]
                whole = (0,) * len(parameter.shape)
                values = initial_values(
                    parameter, self.config.model, self.config.run.seed, whole, parameter.shape
                )
                view.copy_(torch.from_numpy(values).view(view.shape))

    def _make_moments(self) -> None:
        """Let torch make its optimizer state: an update with zero gradients at rate zero."""
        for weight in self.model.parameters():
            weight.grad = torch.zeros_like(weight)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for state in self.optimizer.state.values():
            state["step"].zero_()

    def _accumulate_gradients(self, sequences: Sequences) -> Tensor:
        """Add up the gradient of the mean loss over all micro batches; return that loss."""
        counted = self._num_counted(sequences)
        total = torch.zeros((), device=self._device)
        for micro in self._micro_batches(sequences):
            loss = self._loss(*micro) / counted
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

    def _loss(self, tokens: Tensor, documents: Tensor | None) -> Tensor:
        """Sum of the loss over a micro batch; each option decides who hears of the documents."""
        data = self.config.data
        logits = self.model(tokens, documents if data.document_mask else None)
        return next_token_loss(logits, tokens, documents if data.loss_mask else None)

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
