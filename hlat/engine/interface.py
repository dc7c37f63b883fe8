"""Interface between the training loop and the engines.

It is coarse because a pipeline engine runs a whole batch in one call. Batches are NumPy arrays,
values leave the device only in `Engine.read_metrics`, and no mesh or library type crosses the
interface, so that train.py is the same for every engine.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hlat.config.run import Config
from hlat.data.packed_sequences import PackedSequences
from hlat.distributed.parallel_state import ParallelState
from hlat.distributed.state_shard import StateShard
from hlat.model.mlp_spec import StepMetricValue


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one training step or evaluation.

    Attributes:
        loss: Mean cross-entropy in nats per target token, over the global batch.
        grad_norm: Global l2 norm of the gradients before clipping, fp32; None after an evaluation.
        param_norm: Global l2 norm of the weights after the step, fp32; None after an evaluation.
        num_skipped: Steps skipped since the engine was built because of non-finite gradients.
        token_losses: Cross-entropy in nats of each token but the first of each sequence of an
            evaluation, [n, s - 1], 0 for tokens that the loss excludes; None if the engine has only
            their mean.
        model_metrics: Further metrics of the components of the model over the global batch by name,
            a number, or a list with a number, a list or None for each layer.
    """

    loss: float
    grad_norm: float | None = None
    param_norm: float | None = None
    num_skipped: int = 0
    token_losses: NDArray[np.float32] | None = field(default=None, compare=False, repr=False)
    model_metrics: dict[str, StepMetricValue] = field(default_factory=dict)

    @property
    def scalars(self) -> dict[str, float | None]:
        """Loss and norms by name."""
        return {"loss": self.loss, "grad_norm": self.grad_norm, "param_norm": self.param_norm}

    @property
    def columns(self) -> dict[str, StepMetricValue | None]:
        """Loss, norms and the metrics of components, as logged in metrics.jsonl."""
        return {**self.scalars, **self.model_metrics}


@dataclass(frozen=True)
class LinkReport:
    """Result of all-reducing known values along one mesh axis, as measured on one rank.

    Attributes:
        axis: Name of the axis.
        ranks: Global ranks along it.
        num_wrong: Wrong elements of the sums on this rank.
        wrong_pairs: If a sum was wrong, this rank and each rank (or itself) with a wrong element in
            its contribution.
        bytes_per_s: Bandwidth of an all-reduce per link of a ring.
        expected_bytes_per_s: Configured bandwidth of the link; None if unknown.
        slow_pairs: If an all-reduce was too slow, this rank and each ring neighbor with a slow
            link.
    """

    axis: str
    ranks: list[int]
    num_wrong: int
    wrong_pairs: list[list[int]]
    bytes_per_s: float
    expected_bytes_per_s: float | None
    slow_pairs: list[list[int]]


@dataclass(frozen=True)
class DeviceReport:
    """Result of the checks of one rank's device and links, JSON serializable.

    Attributes:
        device: Name of the device.
        free_bytes: Free device memory; None if the device does not report it.
        total_bytes: Total device memory; None if the device does not report it.
        num_products: Matmuls of which every element was compared with the known result.
        num_wrong: Wrong elements of them.
        flops_per_s: Speed of the matmuls in FLOP/s.
        links: One report per axis with other ranks.
        rounded_up_share: Share of casts of 1 + 2^-10 to bf16 that were rounded up; None if the
            device has no stochastic rounding.
    """

    device: str
    free_bytes: int | None
    total_bytes: int | None
    num_products: int
    num_wrong: int
    flops_per_s: float
    links: list[LinkReport]
    rounded_up_share: float | None = None


@dataclass(frozen=True)
class ReplicaMismatch:
    """A replicated slice of the state, by kind and canonical name, with different replicas.

    Attributes:
        ranks: Global ranks with a replica, along a mesh axis.
        odd: Ranks with a replica that differs from the majority; empty without a majority.
    """

    name: str
    ranks: list[int]
    odd: list[int]


class DecodeState(Protocol):
    """KV cache of a batch of sequences, and the operations of autoregressive decoding.

    All ranks of a model replica make the same calls and get the same results. A training step
    invalidates the state.
    """

    def select(self, rows: NDArray[np.int64], max_new_tokens: int) -> "DecodeState":
        """Return a new state with copies of some sequences of this one.

        Args:
            rows: Rows of this batch, [n]; a row may repeat.
            max_new_tokens: Capacity beyond the longest of them. With 0, empty sequences still
                accept one `append`, which caches nothing.
        """

    def concat(self, others: "Sequence[DecodeState]", max_new_tokens: int) -> "DecodeState":
        """Return a new state with copies of the sequences of this one, then of others.

        Args:
            others: States of the same engine.
            max_new_tokens: Capacity beyond the longest of them.
        """

    def append(self, tokens: NDArray[np.int32], input_lengths: NDArray[np.int64]) -> None:
        """Run the model on the next tokens of each sequence and cache their keys and values.

        Args:
            tokens: [n, s], right-padded with any token id; s must fit into the capacity.
            input_lengths: Number of tokens of each row without padding, [n].
        """

    def compute_log_probs(
        self, rows: NDArray[np.int64], positions: NDArray[np.int64], tokens: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return log-probabilities of tokens; softmax is in fp32 in every recipe.

        Args:
            rows: Row of each query, [q].
            positions: Index into the tokens of the last `append` that the token follows, [q].
            tokens: Token ids, [q].

        Returns:
            Natural log-probabilities and the argmax token at each position, both [q].
        """

    def compute_top_log_probs(
        self,
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        tokens: NDArray[np.int64],
        num_top: int,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
        """Return log-probabilities of tokens and of the most likely tokens; softmax is in fp32.

        Args:
            rows: Row of each query, [q].
            positions: Index into the tokens of the last `append` that the token follows, [q].
            tokens: Token ids, [q].
            num_top: Number of most likely tokens, limited by the vocabulary.

        Returns:
            Natural log-probabilities, [q], then log-probabilities and ids of the most likely
            tokens, descending, both [q, num_top].
        """

    def sample(
        self,
        rows: NDArray[np.int64],
        random_bits: NDArray[np.int64],
        temperatures: NDArray[np.float64],
        top_ps: NDArray[np.float64],
    ) -> NDArray[np.int32]:
        """Sample the next token of rows.

        Args:
            rows: Rows of the batch, [q]; a row may repeat.
            random_bits: Uniform in range(2**32), one per sample, [q].
            temperatures: Divisor of the logits before the softmax, [q]; 0 selects the argmax.
            top_ps: Nucleus sampling: sample from the smallest set of most probable tokens with a
                total probability of at least this value, [q].
        """


class StepRecording(Protocol):
    """Running record of a training step by torch.profiler."""

    def stop(self, memory_path: Path) -> None:
        """Wait for the device and stop recording.

        With profiler.memory, write a snapshot of the memory to `memory_path` if the device has one.

        Raises:
            OSError: The snapshot cannot be written.
        """

    def write_trace(self, path: Path) -> None:
        """Write the trace as JSON compressed with gzip; call it after `stop`.

        Raises:
            OSError: The trace cannot be written.
        """


DeviceMetrics = Any
"""Metrics on the device; `Engine.read_metrics` copies them to the host."""


class Engine(Protocol):
    """One process of a training engine.

    It applies data.document_mask in attention and positions, and data.loss_mask in numerator and
    denominator of the loss, unless validation rejects them for it.
    """

    parallel_state: ParallelState
    """Valid, like `device`, after `run_device_checks` or `build`."""
    device: str
    """Name of the device in the run record."""

    def run_device_checks(self, config: Config) -> DeviceReport:
        """Check matmuls and collectives against known results; all ranks call it before `build`.

        Raises:
            MissingDeviceError: This process has no device.
        """

    def build(self, config: Config, training: bool = True, initialize: bool = True) -> None:
        """Build this rank's shard of the model.

        Args:
            config: Configuration of the run.
            training: If False, allocate the weights of the forward pass only; `state_shards` then
                yields no optimizer state.
            initialize: If False, weights have no defined values until `init_weights` is called or
                all `state_shards` are filled.

        Raises:
            ConfigError: The engine or its device does not support the configuration.
        """

    def init_weights(self) -> None:
        """Set the weights to functions of (seed, name, index); all ranks call it.

        State tensors that start as the weights are set to them.
        """

    def train_step(
        self, sequences: PackedSequences, learning_rate: float, diagnose: bool = False
    ) -> DeviceMetrics:
        """Run one optimizer step over all micro batches without waiting for the device.

        Non-finite gradients leave weights, optimizer state and step counts bit-identical.

        Args:
            sequences: Shard of this data-parallel rank, [global_batch_size / dp, sequence_length].
            learning_rate: Rate of this step.
            diagnose: Add the columns of tracking.diagnostics to `StepMetrics.model_metrics` on rank
                0. The step is the same to the last bit.
        """

    def start_recording(self) -> StepRecording:
        """Record the next training step on this rank, with the settings in `profiler`.

        Raises:
            RuntimeError: torch.profiler cannot start.
        """

    def eval_step(self, sequences: PackedSequences) -> DeviceMetrics:
        """Compute the loss of the target tokens of sequences [n, s] for any n."""

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Evaluate the averaged weights of the state within the context; all ranks call it.

        Only evaluation and decoding are valid within it. A copy of the weights that this rank
        updates is allocated.
        """

    def compute_metrics(self, names: Sequence[str], sequences: PackedSequences) -> dict[str, float]:
        """Return metrics of extensions for the current weights on rank 0, else {}.

        All ranks call it, each with its shard of a batch, of which one micro batch is used.
        """

    def create_decode_state(self) -> DecodeState:
        """Return a state of one empty sequence, from which `select` makes all others.

        Replicas may make different calls.

        Raises:
            ConfigError: The engine or layout does not support decoding.
        """

    def read_metrics(self, metrics: DeviceMetrics) -> StepMetrics:
        """Return the metrics of the newest step or an evaluation: the only host synchronization."""

    def peak_memory(self) -> int | None:
        """Return the peak device memory of this process in bytes, without waiting for the device.

        Main memory on a CPU; None if the device does not report it.
        """

    def state_shards(self) -> Iterator[StateShard]:
        """Yield every tensor of the state for the checkpoint store to save or fill."""

    def saved_state_shards(self) -> Iterator[StateShard]:
        """Yield the shards that this rank saves, without copying others from the device."""

    def find_replica_mismatches(self) -> list[ReplicaMismatch]:
        """Return replicated slices that differ between this rank and others; all ranks call it."""

    def close(self) -> None:
        """Destroy process groups and release memory."""
