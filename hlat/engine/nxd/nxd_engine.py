"""Training engine on neuronx-distributed, for Trainium; its tests run it on a CPU."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import neuronx_distributed as nxd
import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime
from neuronx_distributed.parallel_layers import parallel_state
from torch import Tensor, nn

from hlat.config.engine_capabilities import validate_decoding, validate_device
from hlat.config.precision import Dtype, RoundingMode
from hlat.config.run import Config
from hlat.data.packed_sequences import PackedSequences, compute_loss_mask
from hlat.distributed.mesh_object_group import build_parallel_state
from hlat.distributed.parallel_state import ParallelState
from hlat.distributed.state_shard import StateShard
from hlat.engine import replica_comparison
from hlat.engine.device_checks import DeviceContext, run_device_checks
from hlat.engine.interface import (
    DecodeState,
    DeviceReport,
    ReplicaMismatch,
    StepMetrics,
    StepRecording,
)
from hlat.engine.nxd.host_state import HostState
from hlat.engine.nxd.nxd_config import build_nxd_config
from hlat.engine.nxd.nxd_layers import NxdCausalLM
from hlat.engine.nxd.nxd_parameters import NxdParameters, compute_param_shards
from hlat.engine.nxd.nxd_process_groups import build_device_axes, build_host_axes
from hlat.engine.nxd.xla_dtypes import get_xla_dtypes
from hlat.engine.nxd.xla_optimizer import XlaOptimizer
from hlat.engine.state_shards import init_weights
from hlat.model.decoder_spec import list_parameter_specs
from hlat.model.loss import IGNORE_INDEX, build_next_token_targets
from hlat.optim.optimizer_factory import build_param_groups, get_update_rule

_CLIP_EPSILON = 1e-6
"""Added to the norm in clipping, as in torch and NxD."""


class NxdEngine:
    """Implementation of hlat.engine.interface.Engine on neuronx-distributed."""

    parallel_state = ParallelState()
    device = ""

    def run_device_checks(self, config: Config) -> DeviceReport:
        """Check matmuls and collectives against known results."""
        self._init_distributed(config)
        dtype, axes = self._dtypes[config.precision.compute_dtype], build_device_axes()
        context = DeviceContext(
            self._device,
            dtype,
            axes,
            torch_xla.sync,
            supports_send_recv=False,
            rounding_dtypes=(self._dtypes[Dtype.fp32], self._dtypes[Dtype.bf16]),
        )
        return run_device_checks(config, context)

    def build(self, config: Config, training: bool = True, initialize: bool = True) -> None:
        """Build this rank's shard of the model and its optimizer.

        Raises:
            ConfigError: `training` is False.
        """
        if not training:
            validate_decoding(config)
        self._init_distributed(config)
        self._specs = {spec.name: spec for spec in list_parameter_specs(config.model)}
        self._model = nxd.initialize_parallel_model(self._nxd_config, self._build_model)
        self.params = self._build_params()
        self._num_skipped = torch.zeros((), dtype=torch.int32, device=self._device)
        torch_xla.sync()  # otherwise the zeros of the state are part of the first step's graph
        is_main_replica = config.parallelism.zero > 0 or self.parallel_state.dp_rank == 0
        self._host_state = HostState(self.params, self._specs, config.precision, is_main_replica)
        if initialize:
            self.init_weights()

    def init_weights(self) -> None:
        """Set the weights to their initial values."""
        init_weights(self.state_shards(), self._specs, self.config, self._host_axes["tp"])

    def train_step(
        self, sequences: PackedSequences, learning_rate: float, diagnose: bool = False
    ) -> dict[str, Tensor]:
        """Run one optimizer step over all micro batches without waiting for the device."""
        assert not diagnose, "the capability table forbids tracking.diagnostics"
        self._sync_stale_params()
        loss = self._backward(self._build_batch(sequences))
        self.params.base_optimizer.set_lr(learning_rate)
        self.params.optimizer.step()
        self.params.optimizer.zero_grad(set_to_none=True)
        if self._broadcasts_replicas:
            self.params.broadcast_replicas()
        self._all_reduce_loss(loss)
        loss /= self.parallel_state.dp_size
        torch_xla.sync()
        return {"loss": loss, "grad_norm": self._grad_norm}

    @torch.no_grad()
    def start_recording(self) -> StepRecording:
        """Raise AssertionError."""
        raise AssertionError("the capability table forbids profiles")

    def eval_step(self, sequences: PackedSequences) -> dict[str, Tensor]:
        """Compute the mean loss of sequences, the same on every rank.

        The batch is padded with sequences of weight zero, so that any number of them has one graph.
        """
        self._sync_stale_params()
        config, dp = self.config, self.parallel_state.dp_size
        is_pipelined = config.parallelism.pp > 1
        size = config.batch.global_batch_size // dp if is_pipelined else config.micro_batch_size
        batch = _pad_batch(self._build_batch(sequences, dp_sharded=False), size * dp)
        loss = self._build_zero_loss()
        for start in range(self.parallel_state.dp_rank * size, len(batch["tokens"]), dp * size):
            loss += self._forward(_select_sequences(batch, start, size))
            torch_xla.sync()
        self._all_reduce_loss(loss)
        torch_xla.sync()
        return {"loss": loss}

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Raise RuntimeError, since validation rejects optimizers with an average."""
        raise RuntimeError("engine=nxd has no average of the weights; use engine=native")

    def compute_metrics(self, names: Sequence[str], sequences: PackedSequences) -> dict[str, float]:
        """Return {}; validation rejects metrics of extensions."""
        assert not names, "the capability table forbids tracking.metrics"
        return {}

    def create_decode_state(self) -> DecodeState:
        """Raise ConfigError: the engine does not decode."""
        validate_decoding(self.config)
        raise AssertionError("the capability table forbids decoding")

    def read_metrics(self, metrics: dict[str, Tensor]) -> StepMetrics:
        """Wait for the device and return the metrics; a collective over all ranks."""
        if "grad_norm" not in metrics:
            return StepMetrics(metrics["loss"].item())
        params = self.params.local_params.items()
        param_norm = self.params.compute_norm(
            {name: param.optimizer_param.detach() for name, param in params}
        )
        num_skipped = self._num_skipped.to(param_norm.dtype)
        values = torch.stack([metrics["loss"], metrics["grad_norm"], param_norm, num_skipped])
        torch_xla.sync()  # ends the chain of collectives, which the next graph would continue
        loss, grad_norm, norm, skipped = values.tolist()  # one transfer
        return StepMetrics(loss, grad_norm, norm, int(skipped))

    def peak_memory(self) -> int | None:
        """Return None: PyTorch/XLA does not report the memory of these devices."""
        return None

    def state_shards(self) -> Iterator[StateShard]:
        """Yield weights, optimizer state and step counts of the rows that this rank updates.

        Chunks are in host memory; changed ones are copied to the device before the next step.
        """
        names = self.params.local_params.keys()
        return self._host_state.iter_shards(names, kept_names=names)

    def saved_state_shards(self) -> Iterator[StateShard]:
        """Yield the shards that this rank saves; other parameters are not copied to the host."""
        names = self._host_state.find_saved_names()
        shards = self._host_state.iter_shards(names, kept_names=names)
        return (shard for shard in shards if shard.is_main_replica)

    def find_replica_mismatches(self) -> list[ReplicaMismatch]:
        """Return slices that differ between data-parallel or tensor-parallel ranks.

        With precision.allow_replica_divergence, tensor-parallel replicas may differ and are not
        compared. Host memory keeps only what this rank saves, because a save follows.
        """
        axes = [self._host_axes["dp"]]
        if not self.config.precision.allow_replica_divergence:
            axes.append(self._host_axes["tp"])
        saved_names = self._host_state.find_saved_names()
        shards = self._host_state.iter_shards(self.params.local_params, saved_names)
        return replica_comparison.find_replica_mismatches(shards, axes)

    def close(self) -> None:
        """Release model and optimizer, and destroy the process groups."""
        for name in ("_model", "params", "_host_state"):
            vars(self).pop(name, None)
        self.parallel_state.world_group.any(False)  # waits for all ranks
        dist.destroy_process_group()

    def _init_distributed(self, config: Config) -> None:
        """Initialize torch.distributed and NxD on the first call.

        Raises:
            ConfigError: The device does not support the recipe.
        """
        if self.device:
            return
        validate_device(config, torch_xla.runtime.device_type().lower())
        self.config, self._dtypes = config, get_xla_dtypes(config.compiler, config.precision)
        stochastic = config.precision.rounding is RoundingMode.stochastic
        self._broadcasts_replicas = stochastic and not config.precision.allow_replica_divergence
        if not dist.is_initialized():
            # Axes over host memory connect through the store that the variable would remove
            os.environ["XLA_USE_DUMMY_STORE"] = "0"
            dist.init_process_group("xla", init_method="xla://")
        self._nxd_config = build_nxd_config(config)
        self._host_axes = build_host_axes()
        self.parallel_state = build_parallel_state(dist.get_rank(), self._host_axes)
        self._device = xm.xla_device()
        self.device = str(self._device)

    def _build_model(self) -> nn.Module:
        with torch.device("meta"):
            return NxdCausalLM(self.config)

    def _build_params(self) -> NxdParameters:
        named_params = {
            name.removeprefix("module.").removeprefix("model."): param
            for name, param in self._model.named_parameters()
        }
        config, zero = self.config, self.config.parallelism.zero > 0
        fp32, state_dtype = (
            self._dtypes[Dtype.fp32],
            self._dtypes[config.precision.optimizer_state_dtype],
        )
        shards = compute_param_shards(config, named_params)
        nxd_optimizer = nxd.initialize_parallel_optimizer(
            self._nxd_config,
            XlaOptimizer,
            build_param_groups(
                config.optimizer,
                ((param, shards[name][0].role) for name, param in named_params.items()),
            ),
            rule=get_update_rule(config.optimizer),
            lr=config.optimizer.lr,
            dtype=fp32,
            clip_and_check=self._clip_gradients,
            **({"optimizer_dtype": state_dtype} if zero else {}),
        )
        return NxdParameters(named_params, shards, nxd_optimizer, zero, fp32)

    @torch.no_grad()
    def _sync_stale_params(self) -> None:
        """Update the model after `state_shards` may have been filled.

        The graph ends here, so that a step after a restore has the graphs of every other step.
        """
        changed_keys = self._host_state.copy_to_device()
        if "weights" in changed_keys:
            self.params.sync_model_params()
        if changed_keys:
            torch_xla.sync()

    def _build_batch(
        self, sequences: PackedSequences, dp_sharded: bool = True
    ) -> dict[str, Tensor]:
        """Return tokens, targets and the weight of each position's loss, in host memory.

        NxD averages the loss over data-parallel ranks if each has its shard, `dp_sharded`.
        """
        loss_mask, tokens = self.config.data.loss_mask, torch.from_numpy(sequences.tokens)
        documents = torch.from_numpy(sequences.document_ids) if loss_mask else None
        targets = build_next_token_targets(tokens, documents)
        if sequences.target_mask is not None:
            is_excluded = ~torch.from_numpy(sequences.target_mask[:, 1:])
            targets[:, :-1].masked_fill_(is_excluded, IGNORE_INDEX)
        num_targets = torch.tensor(int(compute_loss_mask(sequences, loss_mask).sum()))
        num_shards = 1
        if dp_sharded and loss_mask:
            self._host_axes["dp"].all_reduce(num_targets)
            num_shards = self.parallel_state.dp_size
        is_target = (targets != IGNORE_INDEX).to(self._dtypes[Dtype.fp32])
        weights = is_target * num_shards / max(1, int(num_targets))
        return {"tokens": tokens, "targets": targets.clamp(min=0), "weights": weights}

    def _backward(self, batch: dict[str, Tensor]) -> Tensor:
        """Accumulate gradients of a batch; return the loss on ranks with the head, else 0."""
        if self.config.parallelism.pp > 1:
            return self._run_pipeline(self._model.run_train, batch)
        loss = self._build_zero_loss()
        size = self.config.micro_batch_size
        for start in range(0, len(batch["tokens"]), size):
            micro_batch = _select_sequences(batch, start, size)
            loss += self._model.run_train(**self._to_device(micro_batch)).detach()
            torch_xla.sync()
        return loss

    def _forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss of a batch, or of a micro batch, on ranks with the head, else 0."""
        if self.config.parallelism.pp > 1:
            return self._run_pipeline(self._model.run_eval, batch)
        loss: Tensor = self._model(**self._to_device(batch))
        return loss

    def _run_pipeline(self, run: Callable[..., Tensor | None], batch: dict[str, Tensor]) -> Tensor:
        """Return the loss of a batch, which NxD splits and averages over micro batches."""
        weights = batch["weights"] * self.config.num_micro_batches
        loss = run(**batch | {"weights": weights})
        return self._build_zero_loss() if loss is None else loss.detach().to(self._device)

    def _clip_gradients(self, param_groups: list[dict[str, Any]]) -> Tensor:
        """Clip all gradients by their norm; return True if it is finite."""
        gradients = self.params.collect_gradients()
        self._grad_norm = self.params.compute_norm(gradients)
        max_norm = self.config.optimizer.grad_clip
        if max_norm:
            coefficient = (max_norm / (self._grad_norm + _CLIP_EPSILON)).clamp(max=1.0)
            for gradient in gradients.values():
                gradient.mul_(coefficient)
        finite = torch.isfinite(self._grad_norm)
        self._num_skipped += ~finite
        return finite

    def _all_reduce_loss(self, loss: Tensor) -> None:
        """Sum over data-parallel ranks and pipeline stages."""
        dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        dist.all_reduce(loss, group=parallel_state.get_pipeline_model_parallel_group())

    def _to_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self._device) for name, tensor in batch.items()}

    def _build_zero_loss(self) -> Tensor:
        return torch.zeros((), dtype=self._dtypes[Dtype.fp32], device=self._device)


def _select_sequences(batch: dict[str, Tensor], start: int, count: int) -> dict[str, Tensor]:
    return {name: tensor[start : start + count] for name, tensor in batch.items()}


def _pad_batch(batch: dict[str, Tensor], multiple: int) -> dict[str, Tensor]:
    """Pad a batch to a multiple of sequences with its first sequence at weight zero."""
    missing = -len(batch["tokens"]) % multiple
    padded = {name: torch.cat([part, part[:1].expand(missing, -1)]) for name, part in batch.items()}
    padded["weights"][len(batch["weights"]) :] = 0
    return padded
