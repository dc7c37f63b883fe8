"""Test harness around an engine, which uses only the engine interface.

Weights, gradients and optimizer state are read and written through checkpoint shards, so a check
works for every engine, layout and device. Gradients are derived from the state after one step from
zero.
"""

import base64
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hlat.config.engine import EngineBackend
from hlat.config.run import Config
from hlat.data.packed_sequences import PackedSequences
from hlat.distributed.object_group import broadcast_object
from hlat.distributed.state_shard import BUFFERS, StateShard
from hlat.doctor.sampled_inputs import (
    FullTensors,
    StateTensors,
    list_state_keys,
    sample_batch,
    sample_documents,
    sample_weights,
)
from hlat.engine.engine_factory import create_engine
from hlat.engine.interface import Engine, StepMetrics
from hlat.engine.state_shards import copy_weights
from hlat.model.decoder_spec import list_buffer_specs, list_parameter_specs
from hlat.model.parameter_spec import ParameterRole
from hlat.optim.optimizer_spec import (
    compute_saved_shapes,
    get_optimizer_spec,
    list_weight_copies,
)
from hlat.precision.torch_dtypes import TORCH_DTYPES


class CheckError(Exception):
    """Exception of a check on rank 0, which all ranks raise."""


class EngineHarness:
    """Engine on which a reduced model is built; all methods are collective calls."""

    def __init__(self, config: Config, engine: Engine) -> None:
        self.config, self.engine = config, engine
        engine.build(config)
        self.parameters = {spec.name: spec for spec in list_parameter_specs(config.model)}
        self.buffers = {spec.name: spec for spec in list_buffer_specs(config.model)}
        self.optimizer = get_optimizer_spec(config.optimizer.name)

    @property
    def can_rebuild(self) -> bool:
        """True if a process may build several models; neuronx-distributed supports one layout."""
        return self.config.engine.name is EngineBackend.native

    @property
    def is_rank0(self) -> bool:
        """True on the rank that evaluates."""
        return self.engine.parallel_state.is_rank0

    def broadcast_object(self, value: Any) -> Any:
        """Return the JSON value of rank 0 on all ranks."""
        return broadcast_object(self.engine.parallel_state.world_group, value)

    def run_on_rank0(self, action: Callable[[], Any]) -> Any:
        """Run `action` on rank 0, and return its result there and None on the other ranks.

        Raises:
            CheckError: On all ranks, if the action raised an exception.
        """
        result, message = None, None
        if self.is_rank0:
            try:
                result = action()
            except Exception as error:
                message = f"{type(error).__name__}: {error}"
        if message := self.broadcast_object(message):
            raise CheckError(message)
        return result

    @contextmanager
    def with_config(self, config: Config) -> "Iterator[EngineHarness]":
        """Build another engine of the same processes within the context."""
        harness = EngineHarness(config, create_engine(config))
        try:
            yield harness
        finally:
            harness.engine.close()

    @contextmanager
    def with_gradient_source(self) -> "Iterator[EngineHarness]":
        """Return a harness with an optimizer state that has multiples of the gradients.

        It has the default optimizer, since gradients do not depend on the optimizer.
        """
        settings = self.config.optimizer
        if self.optimizer.get_gradient_source(settings, ParameterRole.matrix) is not None:
            yield self
            return
        optimizer = replace(settings, name=type(settings)().name)
        with self.with_config(replace(self.config, optimizer=optimizer)) as other:
            yield other

    @contextmanager
    def without_router_losses(self) -> "Iterator[EngineHarness]":
        """Return a harness in which `remove_gradients` removes those of the routers too."""
        model = self.config.model
        moe = replace(model.mlp.moe, balance_loss=0.0, z_loss=0.0)
        if moe == model.mlp.moe:
            yield self
            return
        model = replace(model, mlp=replace(model.mlp, moe=moe))
        with self.with_config(replace(self.config, model=model)) as other:
            yield other

    def train_step(self, tokens: NDArray[np.int32], learning_rate: float) -> StepMetrics:
        """Run one step on a global batch, of which this rank uses its data-parallel shard.

        The rows contain the documents of `sample_documents`.
        """
        parallel = self.engine.parallel_state
        rows, documents = (
            np.ascontiguousarray(array[parallel.dp_rank :: parallel.dp_size])
            for array in (tokens, sample_documents(self.config, tokens))
        )
        sequences = PackedSequences(rows, documents)
        return self.engine.read_metrics(self.engine.train_step(sequences, learning_rate))

    def train(self, num_steps: int, learning_rate: float) -> list[StepMetrics]:
        """Train random weights on different batches; return the metrics of each step."""
        self.load_random_weights()
        batches = [sample_batch(self.config, seed) for seed in range(num_steps)]
        return [self.train_step(batch, learning_rate) for batch in batches]

    def step_with_gradients(self, tokens: NDArray[np.int32]) -> tuple[StepMetrics, FullTensors]:
        """Run one step with learning rate 0 from a zero optimizer state.

        Return its metrics, and on rank 0 the gradients before clipping.
        """
        self.set_optimizer_state(self.optimizer.num_initial_updates)
        metrics = self.train_step(tokens, 0.0)
        clip_factor = compute_clip_factor(self.config, metrics)
        gradients = self.gather_gradients()
        return metrics, {name: one * np.float32(1 / clip_factor) for name, one in gradients.items()}

    def gather_gradients(self) -> FullTensors:
        """Return the gradients of an update from a zero optimizer state, clipped, on rank 0."""
        sources = dict[str, tuple[str, float]]()
        for name, spec in self.parameters.items():
            source = self.optimizer.get_gradient_source(self.config.optimizer, spec.role)
            assert source is not None, "use with_gradient_source"
            sources[name] = source
        states = {key: self.gather_full_tensors(key) for key, _ in dict.fromkeys(sources.values())}
        if not self.is_rank0:
            return {}
        return {
            name: states[key][name] * np.float32(1 / factor)
            for name, (key, factor) in sources.items()
        }

    def evaluate(
        self,
        tokens: NDArray[np.int32],
        documents: NDArray[np.int32],
        target_mask: NDArray[np.bool_] | None = None,
    ) -> float:
        """Return the mean loss of sequences, or of the tokens in a mask, given on all ranks."""
        sequences = PackedSequences(tokens, documents, target_mask)
        return self.engine.read_metrics(self.engine.eval_step(sequences)).loss

    def load_random_weights(self) -> FullTensors:
        """Load `sample_weights` with an initial optimizer state; return the weights."""
        weights = sample_weights(self.config)
        self.load_weights(weights)
        self.set_optimizer_state()
        copies = list_weight_copies(self.config.optimizer, self.parameters.values())
        copy_weights(self.engine.state_shards(), copies)
        return weights

    @torch.no_grad()
    def set_optimizer_state(self, num_updates: int = 0, **values: float) -> None:
        """Set the number of updates and tensors of the state, and all else of it to zero.

        Buffers are set to their initial values.
        """
        values["updates"] = float(num_updates)
        for shard in self.engine.state_shards():
            state_key, _, name = shard.name.partition("/")
            if state_key == BUFFERS:
                shard.tensor.fill_(self.buffers[name].initial_value)
            elif state_key != "weights":
                shard.tensor.fill_(values.get(state_key, 0.0))

    def load_weights(self, weights: FullTensors) -> None:
        """Load full tensors, given on all ranks."""
        self.load_tensors({"weights": weights})

    @torch.no_grad()
    def load_tensors(self, state: StateTensors) -> None:
        """Load full tensors by state key, given on all ranks; other state keys do not change."""
        for shard in self.engine.state_shards():
            state_key, _, name = shard.name.partition("/")
            if state_key in state:
                part = state[state_key][name][_to_slices(shard.offset, shard.size)]
                values = torch.from_numpy(np.ascontiguousarray(part))
                shard.tensor.copy_(values.view(shard.tensor.shape))

    def gather_state(self) -> StateTensors:
        """Return weights, optimizer state, updates and buffers by state key, on rank 0."""
        keys = ("weights", *list_state_keys(self.config), "updates", BUFFERS)
        return {key: self.gather_full_tensors(key) for key in keys}

    def gather_full_tensors(self, state_key: str) -> FullTensors:
        """Return the tensors of one state key on rank 0, assembled from the saved shards.

        Elements without a shard are NaN. Parameters without this state are omitted.
        """
        prefix = f"{state_key}/"
        shards = self.gather_chunks(
            lambda shard: shard.is_main_replica and shard.name.startswith(prefix)
        )
        if not self.is_rank0:
            return {}
        shapes = {
            name: {"weights": spec.shape, "updates": (), **self.compute_state_shapes(name)}
            for name, spec in self.parameters.items()
        }
        shapes |= {name: {BUFFERS: spec.shape} for name, spec in self.buffers.items()}
        full_tensors = {
            name: np.full(by_key[state_key], np.nan, np.float32)
            for name, by_key in shapes.items()
            if state_key in by_key
        }
        for name, offset, size, values in shards:
            full_tensors[name.removeprefix(prefix)][_to_slices(offset, size)] = values.reshape(size)
        return full_tensors

    def compute_state_shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the optimizer state of a parameter by state key."""
        spec = self.parameters[name]
        shapes = compute_saved_shapes(self.config.optimizer, spec.role, spec.shape)
        return {tensor.name: shape for tensor, shape in shapes.items()}

    def gather_chunks(
        self, select: Callable[[StateShard], bool]
    ) -> list[tuple[str, list[int], list[int], NDArray[np.float32]]]:
        """Return name, offset, size and values of the selected shards of all ranks on rank 0."""
        shards = [
            [shard.name, shard.offset, shard.size, _encode_tensor(shard.tensor)]
            for shard in self.engine.state_shards()
            if select(shard)
        ]
        return [
            (name, offset, size, np.frombuffer(base64.b64decode(content), np.float32))
            for gathered in self.engine.parallel_state.world_group.gather_object(shards)
            for name, offset, size, content in gathered
        ]

    def round_to_weight_dtype(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Round values to the dtype of the (master) weights."""
        precision = self.config.precision
        dtype = TORCH_DTYPES[precision.master_weight_dtype or precision.param_dtype]
        return torch.from_numpy(values).to(dtype).float().numpy()

    @contextmanager
    def make_temporary_dir(self) -> Iterator[Path]:
        """Create a directory, common to all ranks, within the context."""
        root = Path(self.config.run.root).absolute()
        if not self.is_rank0:
            yield Path(self.broadcast_object(None))
            self.engine.parallel_state.world_group.any(False)
            return
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=root) as directory:
            self.broadcast_object(directory)
            yield Path(directory)
            self.engine.parallel_state.world_group.any(False)  # barrier


def compute_clip_factor(config: Config, metrics: StepMetrics) -> float:
    """Return the factor of the gradients for the reported norm; that of torch's clip_grad_norm_."""
    assert metrics.grad_norm is not None
    max_norm = config.optimizer.grad_clip
    return min(1.0, max_norm / (metrics.grad_norm + 1e-6)) if max_norm else 1.0


def _encode_tensor(tensor: torch.Tensor) -> str:
    """Encode a tensor as fp32 values in base64, for JSON."""
    values = tensor.detach().float().cpu().contiguous().numpy()
    return base64.b64encode(values.tobytes()).decode()


def _to_slices(offset: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + n) for start, n in zip(offset, size, strict=True))
