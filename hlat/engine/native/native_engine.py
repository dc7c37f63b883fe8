"""Training engine on PyTorch only, for one or many processes on any torch device."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hlat.config.engine_capabilities import validate_decoding
from hlat.config.precision import Fp32Operator
from hlat.config.run import Config
from hlat.data.packed_sequences import PackedSequences, compute_loss_mask
from hlat.distributed import rank_environment
from hlat.distributed.device_mesh import ParallelMesh, init_distributed
from hlat.distributed.parallel_state import ParallelState
from hlat.distributed.state_shard import StateShard
from hlat.engine import replica_comparison
from hlat.engine.device_checks import DeviceContext, run_device_checks
from hlat.engine.interface import DeviceReport, ReplicaMismatch, StepMetrics, StepRecording
from hlat.engine.native import fsdp
from hlat.engine.native.decoding import DecodeContext, NativeDecodeState, build_empty_decode_state
from hlat.engine.native.device import (
    copy_to_device,
    find_device,
    prepare_device,
    read_peak_memory,
    select_compile_backend,
    set_environment,
)
from hlat.engine.native.host_memory import release_freed_memory
from hlat.engine.native.layer_transforms import apply_activation_checkpointing, apply_compile
from hlat.engine.native.model_metrics import ModelStatistics, observe_metrics
from hlat.engine.native.model_parts import ModelBuffers, build_model_parts
from hlat.engine.native.pipeline_parallel import (
    DeviceBatch,
    MicroBatchRunner,
    PipelineRunner,
    SequentialRunner,
)
from hlat.engine.native.sharded_parameters import ShardedParameters
from hlat.engine.native.step_diagnostics import StepDiagnostics
from hlat.engine.native.tensor_parallel import TensorParallelRegions
from hlat.engine.native.trainable_parameters import TrainableParameters
from hlat.engine.state_shards import copy_weights, init_weights, iter_state_shards
from hlat.model.auxiliary_loss import set_loss_factor
from hlat.model.decoder import Decoder
from hlat.model.decoder_spec import list_parameter_specs
from hlat.model.loss import IGNORE_INDEX, build_next_token_targets, linear_cross_entropy
from hlat.optim.gradient_norm import compute_global_norm
from hlat.optim.optimizer_spec import list_weight_copies
from hlat.precision.record_range import record_range
from hlat.precision.torch_dtypes import TORCH_DTYPES


class NativeEngine:
    """Implementation of hlat.engine.interface.Engine on PyTorch only."""

    parallel_state = ParallelState()
    device = ""
    _diagnostics: StepDiagnostics | None = None

    def run_device_checks(self, config: Config) -> DeviceReport:
        """Check matmuls and collectives against known results."""
        self._init_distributed(config)
        mesh, dtype = self._mesh, TORCH_DTYPES[config.precision.compute_dtype]
        axes = {"tp": mesh.tp, "dp": mesh.dp, "pp": mesh.pp}
        return run_device_checks(config, DeviceContext(self._device, dtype, axes))

    def build(self, config: Config, training: bool = True, initialize: bool = True) -> None:
        """Build this rank's shard of the model and its optimizer."""
        self._init_distributed(config)
        self._specs = {spec.name: spec for spec in list_parameter_specs(config.model)}
        self._regions = TensorParallelRegions(self._mesh, config.model.vocab_size)
        self.model_parts, local_params = build_model_parts(
            config, self._mesh, self._regions, self._device
        )
        self._compile_backend = backend = select_compile_backend(config, self._device)
        for part in self.model_parts.values():
            apply_activation_checkpointing(part, config.parallelism.activation_checkpointing)
        self._holds_compiler_memory = backend is not None and self._device.type == "cpu"
        if backend is not None:
            apply_compile(self.model_parts.values(), backend)
        self.params = (
            TrainableParameters(local_params, config, self._mesh, backend)
            if training
            else ShardedParameters(local_params, config, self._mesh)
        )
        if self._mesh.pp.size > 1:
            self._runner: MicroBatchRunner = PipelineRunner(
                self.model_parts, config, self._mesh.pp, self._compute_loss
            )
        else:
            self._runner = SequentialRunner(self.model_parts[0], self._compute_loss)
        self._num_skipped = torch.zeros((), device=self._device)
        built = (self.model_parts.values(), config.model, self._mesh, self._device)
        self._buffers, self._statistics = ModelBuffers(*built), ModelStatistics(*built)
        if initialize:
            self.init_weights()

    def init_weights(self) -> None:
        """Set the weights, and the state that starts as the weights, to their initial values."""
        init_weights(self.state_shards(), self._specs, self.config, self._mesh.tp)
        self._buffers.reset()
        copies = list_weight_copies(self.config.optimizer, self._specs.values())
        copy_weights(self.state_shards(), copies)

    def train_step(
        self, sequences: PackedSequences, learning_rate: float, diagnose: bool = False
    ) -> dict[str, Tensor]:
        """Run one optimizer step over all micro batches without waiting for the device."""
        params = self.params
        assert isinstance(params, TrainableParameters), "the engine was built with training=False"
        self._sync_stale_params()
        self._diagnostics = self._observe_logits(sequences) if diagnose else None
        num_targets = self._count_global_target_tokens(sequences)
        scale = 1 / num_targets if num_targets else 0.0  # without targets, no auxiliary loss either
        num_sequences, length = sequences.tokens.shape
        # Shorter sequences have micro batches of the same tokens
        size = self.config.micro_batch_size * self.config.batch.sequence_length // length
        params.start_step(num_sequences // size)
        self._statistics.start_step()
        # Tensor-parallel ranks compute the same auxiliary losses, and sum their gradients
        set_loss_factor(self.model_parts.values(), scale * (length - 1) / self._mesh.tp.size)
        loss = self._runner.backward(self._build_batch(sequences), size, scale)
        gradients = params.collect_gradients()
        loss, grad_norm = self._all_reduce_metrics(loss, gradients)
        self._clip_gradients(grad_norm)
        skip = ~torch.isfinite(grad_norm)
        if self._diagnostics is not None:
            self._diagnostics.start_update(params, learning_rate)
        params.step(learning_rate, skip)
        if self._diagnostics is not None:
            self._diagnostics.finish_update(params, gradients)
        self._statistics.update_buffers(skip)
        self._num_skipped += skip
        if self._holds_compiler_memory:  # after the first step
            release_freed_memory()
            self._holds_compiler_memory = False
        return {"loss": loss, "grad_norm": grad_norm}

    def start_recording(self) -> StepRecording:
        """Record the next training step on this rank, with the settings in `profiler`."""
        from hlat.engine.native.step_recording import TorchStepRecording

        is_compiled = self._compile_backend is not None
        return TorchStepRecording(self.config.profiler, self.model_parts, self._device, is_compiled)

    @torch.no_grad()
    def eval_step(self, sequences: PackedSequences) -> dict[str, Tensor]:
        """Compute the loss of each target token, the same on every rank."""
        self._sync_stale_params()
        dp, size = self._mesh.dp, self.config.micro_batch_size
        shard = self._build_batch(sequences).shard(dp.rank, dp.size)
        if self._compile_backend is not None:
            shard = shard.pad(size)  # another shape would be another graph
        losses = [self._runner.forward(batch, None) for batch in shard.split(size)]
        losses_of_shard = torch.cat(losses)
        self._mesh.pp.all_reduce(losses_of_shard)
        # Row k of shard r is row r + k * dp
        rows = dp.all_gather(losses_of_shard).transpose(0, 1).flatten(0, 1)
        self._reshard()
        token_losses = rows[: len(sequences.tokens), :-1]
        num_targets = torch.tensor(self._count_target_tokens(sequences))
        return {"token_losses": token_losses, "num_targets": num_targets}

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Evaluate the averaged weights within the context."""
        params = self.params
        assert isinstance(params, TrainableParameters), "the engine was built with training=False"
        self._sync_stale_params()
        with params.averaged_weights():
            yield

    @torch.no_grad()
    def compute_metrics(self, names: Sequence[str], sequences: PackedSequences) -> dict[str, float]:
        """Compute metrics of extensions on the first micro batch of each rank."""
        self._sync_stale_params()
        batch = self._build_batch(sequences).split(self.config.micro_batch_size)[0]
        parts = self.model_parts.values()
        with observe_metrics(parts, names) as recorder:
            self._runner.forward(batch, None)
        self._reshard()
        return recorder.gather_means(self.parallel_state.world_group)

    def create_decode_state(self) -> NativeDecodeState:
        """Return a state of one empty sequence.

        Raises:
            ConfigError: The engine cannot decode with this layout.
        """
        validate_decoding(self.config)
        self._sync_stale_params()
        context = DecodeContext(
            self.config,
            self.model_parts,
            self._runner,
            self._regions,
            self._mesh.pp,
            self._device,
        )
        return build_empty_decode_state(context)

    def read_metrics(self, metrics: dict[str, Tensor]) -> StepMetrics:
        """Wait for the device and return the metrics; a collective over all ranks."""
        if "token_losses" in metrics:
            token_losses = metrics["token_losses"].cpu().numpy()
            total = float(token_losses.sum(dtype=np.float64))
            loss = total / max(1, int(metrics["num_targets"]))
            return StepMetrics(loss, token_losses=token_losses)
        weights = {name: self.params.get_state(name)["weights"] for name in self.params.shards}
        _, param_norm = self._all_reduce_metrics(metrics["loss"], weights)
        values = torch.stack([metrics["loss"], metrics["grad_norm"], param_norm, self._num_skipped])
        mean_loss, *norms, num_skipped = values.tolist()
        model_metrics = self._statistics.compute_metrics()
        if self._diagnostics is not None:
            model_metrics |= self._diagnostics.gather(self.parallel_state.world_group)
        return StepMetrics(
            mean_loss, norms[0], norms[1], int(num_skipped), model_metrics=model_metrics
        )

    def peak_memory(self) -> int | None:
        """Return the peak device memory of this process in bytes."""
        return read_peak_memory(self._device)

    def state_shards(self) -> Iterator[StateShard]:
        """Yield weights, optimizer state and step counts of the rows that this rank updates.

        With master weights, the weights are the master weights. An engine without training yields
        weights only. Buffers follow in both cases.
        """
        self._params_stale = True
        params, specs = self.params, self._specs
        for name, shard in params.shards.items():
            yield from iter_state_shards(params.get_state(name), shard, specs, params.owns(name))
        if isinstance(params, TrainableParameters):
            yield from params.iter_matrix_state_shards()
        yield from self._buffers.iter_state_shards()

    def saved_state_shards(self) -> Iterator[StateShard]:
        """Yield the shards that this rank saves."""
        return (shard for shard in self.state_shards() if shard.is_main_replica)

    def find_replica_mismatches(self) -> list[ReplicaMismatch]:
        """Return slices that differ between ranks; a tied head is a replica of the embedding."""
        axes = [self._mesh.dp, self._mesh.tp]
        if self._mesh.tied_embedding is not None:
            axes.append(self._mesh.tied_embedding)
        return replica_comparison.find_replica_mismatches(self.state_shards(), axes)

    def close(self) -> None:
        """Release model and optimizer, and destroy the process groups."""
        params = getattr(self, "params", None)
        if isinstance(params, TrainableParameters):
            params.close()
        for name in ("model_parts", "params", "_runner", "_statistics", "_buffers"):
            vars(self).pop(name, None)
        if self._owns_process_group:
            self.parallel_state.world_group.any(False)  # waits for all ranks
            dist.destroy_process_group()

    def _init_distributed(self, config: Config) -> None:
        """Select the device and initialize torch.distributed on the first call."""
        if self.device:
            return
        self.config = config
        info = rank_environment.read_rank_info()
        rank = info.rank if config.num_processes > 1 else 0
        set_environment(config)
        self._device = find_device(config, info.local_rank)
        prepare_device(config, self._device)
        self._owns_process_group = init_distributed(rank, config.num_processes, self._device)
        self._mesh = ParallelMesh(config, rank)
        self.parallel_state, self.device = self._mesh.parallel_state, str(self._device)

    def _sync_stale_params(self) -> None:
        """Update the model after `state_shards` may have been filled."""
        if self._params_stale:
            self.params.sync_model_params()
            self._params_stale = False

    @torch.no_grad()
    def _observe_logits(self, sequences: PackedSequences) -> StepDiagnostics:
        """Compute the first sequence of each rank; that of the first one is the global batch's."""
        diagnostics = StepDiagnostics(self.config, is_observed=self._mesh.dp.rank == 0)
        with diagnostics.observe_logits(self.model_parts.values(), self._regions):
            self._runner.forward(self._build_batch(sequences).split(1)[0], None)
        self._reshard()
        return diagnostics

    def _reshard(self) -> None:
        """Free the parameters that a forward pass gathered."""
        if fsdp.uses_fsdp(self.config, self._mesh):
            fsdp.reshard(self.model_parts.values())

    def _build_batch(self, sequences: PackedSequences) -> DeviceBatch:
        data = self.config.data
        tokens = copy_to_device(sequences.tokens, self._device)
        documents = None
        if data.document_mask or data.loss_mask:
            assert sequences.document_ids is not None
            documents = copy_to_device(sequences.document_ids, self._device)
        targets = build_next_token_targets(tokens, documents if data.loss_mask else None)
        if sequences.target_mask is not None:
            is_excluded = ~copy_to_device(sequences.target_mask[:, 1:], self._device)
            targets[:, :-1].masked_fill_(is_excluded, IGNORE_INDEX)
        return DeviceBatch(tokens, documents if data.document_mask else None, targets)

    @record_range("loss")
    def _compute_loss(
        self, part: Decoder, outputs: Tensor, targets: Tensor, scale: float | None
    ) -> Tensor:
        """Return the scaled sum of the loss of a micro batch, or the loss of each token."""
        return linear_cross_entropy(
            self._regions.copy_to_tensor_parallel_region(outputs),
            part.lm_head_weight,
            targets,
            scale,
            Fp32Operator.loss in self.config.precision.fp32_operators,
            self._compile_backend,
            self._regions.vocab_shard,
            self.config.model.head.logit_softcap,
            self.config.model.head.z_loss,
        )

    def _count_target_tokens(self, sequences: PackedSequences) -> int:
        """Count the target tokens on the host.

        Micro batches may differ in this count, so that the mean of their means would not be the
        mean of the batch.
        """
        return int(compute_loss_mask(sequences, self.config.data.loss_mask).sum())

    def _count_global_target_tokens(self, sequences: PackedSequences) -> int:
        """Count the target tokens of all data-parallel ranks."""
        count = self._count_target_tokens(sequences)
        if not self.config.data.loss_mask:
            return count * self._mesh.dp.size
        total = torch.tensor(count)
        self._mesh.dp.all_reduce(total)
        return int(total)

    @record_range("optimizer")
    def _clip_gradients(self, grad_norm: Tensor) -> None:
        """Apply torch's clip_grad_norm_ with the global norm."""
        assert isinstance(self.params, TrainableParameters)
        max_norm = self.config.optimizer.grad_clip
        if max_norm:
            params = self.params.optimizer_params.values()
            torch.nn.utils.clip_grads_with_norm_(params, max_norm, grad_norm)

    @record_range("optimizer")
    def _all_reduce_metrics(
        self, loss: Tensor, values: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of the loss and the norm of values like `optimizer_params` over ranks."""
        tensors = [*self.params.select_owned_rows(values).values()]
        if self._mesh.world_size == 1:
            return loss, compute_global_norm(tensors)
        zero = torch.zeros_like(loss)
        squared_norm = compute_global_norm(tensors).square() if tensors else zero
        both = torch.stack([loss if self._mesh.tp.rank == 0 else zero, squared_norm])
        self._mesh.all_reduce(both)
        return both[0], both[1].sqrt()
