"""Peak memory of one device, by term.

Terms follow from shape, parallel layout and precision recipe. docs/planning.md derives each and
compares them with measurements.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hlat.config.engine import EngineBackend
from hlat.config.parallelism import PipelineSchedule
from hlat.config.run import Config
from hlat.distributed.mesh_coordinates import ParallelDegrees, compute_parallel_degrees
from hlat.model import decoder_spec, embedding_spec
from hlat.model.activation_spec import KernelBackend
from hlat.model.decoder_spec import list_parameter_specs
from hlat.optim.optimizer_spec import EMA, get_optimizer_spec
from hlat.plan.hardware_efficiency import (
    COMPILER_MEMORY_GIB,
    CUDA_CONTEXT_GIB,
    NCCL_ALL_TO_ALL_GIB,
    NCCL_GROUP_GIB,
    PROCESS_MEMORY_GIB,
    RESERVED_MEMORY_GIB,
    get_kernel_backend,
    get_planned_engine,
)
from hlat.plan.pipeline_stage_shards import (
    PipelineStageShard,
    build_execution_settings,
    build_stage_shards,
    compute_hidden_bytes,
    count_micro_batch_tokens,
)
from hlat.precision.precision_bytes import (
    compute_bytes_per_parameter,
    compute_parameter_state_bytes,
    get_itemsize,
)

_NXD_BUCKET_BYTES = 130 * 10**6
"""ALL_GATHER_REDUCE_SCATTER_BUCKET_CAP_MB of NxD 0.9, for gradients of its ZeRO-1 optimizer."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the fullest device, by term.

    Attributes:
        weights: Weights in the forward pass.
        gradients: Gradients of the backward pass, if separate from the accumulated ones.
        accumulation: Gradients accumulated over micro batches.
        master_weights: Master weights of the optimizer.
        optimizer_state: Tensors of the optimizer, such as moments.
        activations: Activations saved for backward, of all micro batches in flight.
        logits: Logits of one chunk and the gradient of the head.
        working: Temporaries and sent gradients of a layer's backward pass, beyond `logits`.
        collectives: Send and receive buffers.
        saving: Snapshot of an asynchronous save, if it is on the device.
        process: Interpreter and libraries of the process, if the device is its host.
        reserve: Runtime and programs; on a GPU the CUDA context and buffers of NCCL.
    """

    weights: float
    gradients: float
    accumulation: float
    master_weights: float
    optimizer_state: float
    activations: float
    logits: float
    working: float
    collectives: float
    saving: float
    process: float
    reserve: float

    @property
    def total(self) -> float:
        """Sum of all terms."""
        return sum(float(term) for term in vars(self).values())


def estimate_memory(config: Config) -> MemoryEstimate:
    """Return the memory of the fullest device at the peak of the backward pass.

    With a single micro batch a step needs less: activations are freed as gradients are allocated.
    """
    mesh = compute_parallel_degrees(config.parallelism, config.num_processes)
    stages = build_stage_shards(config.model, mesh, config.parallelism.stages_per_rank)
    states = estimate_states(config, mesh, stages)
    return estimate_peak(config, mesh, states, compute_activation_bytes(config, mesh))


def get_device_memory_bytes(config: Config) -> float:
    """Return the configured memory of a device, or a process's part of this host's memory."""
    hardware = config.hardware
    if hardware.memory_gib is not None:
        return hardware.memory_gib * 2**30
    host_bytes = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return host_bytes * hardware.nodes / config.num_processes


def compute_checkpoint_bytes(config: Config) -> int:
    """Return the bytes of one checkpoint: (master) weights, optimizer state and average.

    Headers, hashes and the data position, some hundred bytes per tensor, are not included.
    """
    precision = config.precision
    weight_bytes = get_itemsize(precision.master_weight_dtype or precision.param_dtype)
    if config.optimizer.ema_decay is not None:
        weight_bytes += get_itemsize(EMA.get_dtype(precision))
    return sum(
        spec.numel * weight_bytes + compute_parameter_state_bytes(precision, config.optimizer, spec)
        for spec in list_parameter_specs(config.model)
    )


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes of the activations of a rank for a micro batch.

    Attributes:
        saved: Saved by a layer for the backward pass, by the first layer of the same kind.
        temporary: Allocated in the backward pass of a layer, by the same layers.
        shared: Saved once for all layers.
        logits: Logits of one chunk and the gradient of the head.
    """

    saved: Mapping[int, float]
    temporary: Mapping[int, float]
    shared: float
    logits: float


@dataclass(frozen=True)
class PipelineStageMemory:
    """Memory of a pipeline stage that does not depend on micro batches.

    Attributes:
        rank: Pipeline rank that stores most activations of those with an equal stage: the first
            one, or the last one of a zero-bubble schedule.
        stage: Shard of the stage.
        memory: Estimate in which the terms of activations and buffers are 0.
    """

    rank: int
    stage: PipelineStageShard
    memory: MemoryEstimate


def estimate_states(
    config: Config, mesh: ParallelDegrees, stages: Sequence[PipelineStageShard]
) -> list[PipelineStageMemory]:
    """Return the memory of each distinct stage that does not depend on micro batches."""
    by_activations = [*enumerate(stages)]
    if not _is_zero_bubble(config):
        by_activations.reverse()
    ranks = {stage: rank for rank, stage in by_activations}
    return [
        PipelineStageMemory(rank, stage, _estimate_state(config, mesh, stage))
        for stage, rank in ranks.items()
    ]


def estimate_peak(
    config: Config,
    mesh: ParallelDegrees,
    states: Iterable[PipelineStageMemory],
    activations: ActivationBytes,
) -> MemoryEstimate:
    """Return the memory of the fullest stage."""
    terms = [(_estimate_activation_terms(config, mesh, one, activations), one) for one in states]
    fullest, state = max(terms, key=lambda pair: sum(pair[0].values()) + pair[1].memory.total)
    return replace(state.memory, **fullest)


def compute_activation_bytes(config: Config, mesh: ParallelDegrees) -> ActivationBytes:
    """Return the bytes of a micro batch by kind of layer."""
    model, num_tokens = config.model, count_micro_batch_tokens(config)
    execution = build_execution_settings(config, mesh)
    layers = {
        layer: decoder_spec.list_layer_activations(model, layer, execution)
        for layer in set(decoder_spec.group_layers(model))
    }
    shared = decoder_spec.list_shared_activations(model, execution)
    return ActivationBytes(
        {layer: num_tokens * execution.compute_saved_bytes(all_) for layer, all_ in layers.items()},
        {
            layer: num_tokens * execution.compute_temporary_bytes(all_)
            for layer, all_ in layers.items()
        },
        num_tokens * execution.compute_saved_bytes(shared),
        embedding_spec.compute_logit_bytes(model, num_tokens, execution),
    )


def count_micro_batches_in_flight(config: Config, mesh: ParallelDegrees, rank: int) -> float:
    """Return the maximum number of micro batches whose activations a pipeline rank stores.

    p - rank under 1F1B. With v stages per rank, the warm-up of torch's interleaved schedule has
    (v - 1) p + 2 (p - 1 - rank) passes of a stage, one more follows, and each is of 1/v of the
    layers. A zero-bubble schedule has p - 1 - rank fewer passes, and stores the activations of
    `rank` passes longer, until it computes the gradients of their weights.
    """
    num_stages, stages_after = config.parallelism.stages_per_rank, mesh.pp - 1 - rank
    in_flight = float(mesh.pp)
    if config.parallelism.pipeline_schedule is PipelineSchedule.one_f_one_b:
        in_flight = stages_after + 1.0
    elif not _is_zero_bubble(config):
        in_flight = ((num_stages - 1) * mesh.pp + 2 * stages_after + 1) / num_stages
    return min(config.num_micro_batches, in_flight)


def _count_delayed_layers(config: Config, state: PipelineStageMemory) -> float:
    """Return the layers of passes whose gradients of weights a zero-bubble schedule delays."""
    num_passes = min(config.num_micro_batches, state.rank) if _is_zero_bubble(config) else 0
    return num_passes * state.stage.num_layers / config.parallelism.stages_per_rank


def _is_zero_bubble(config: Config) -> bool:
    return config.parallelism.pipeline_schedule is PipelineSchedule.zero_bubble


def _is_nxd(config: Config) -> bool:
    return get_planned_engine(config) is EngineBackend.nxd


def _estimate_activation_terms(
    config: Config, mesh: ParallelDegrees, state: PipelineStageMemory, activations: ActivationBytes
) -> dict[str, float]:
    """Return the terms that depend on the micro batches in flight."""
    stage = state.stage
    logits = activations.logits if stage.is_last else 0.0
    saved = sum(count * activations.saved[layer] for layer, count in stage.layers)
    temporary = max(activations.temporary[layer] for layer, _ in stage.layers)
    sent_gradients = _estimate_layer_gradient_bytes(config, mesh, stage)
    in_flight = count_micro_batches_in_flight(config, mesh, state.rank)
    return {
        "activations": in_flight * (saved + activations.shared)
        + _count_delayed_layers(config, state) * temporary,
        "logits": logits,
        "working": max(0.0, temporary + sent_gradients - logits),
        "collectives": _estimate_collective_buffer_bytes(config, mesh)
        + _estimate_pipeline_buffer_bytes(config, mesh, stage, in_flight),
    }


def _estimate_state(
    config: Config, mesh: ParallelDegrees, stage: PipelineStageShard
) -> MemoryEstimate:
    optimizer = get_optimizer_spec(config.optimizer.name)
    bytes_per_parameter = compute_bytes_per_parameter(config.precision, optimizer)
    zero = config.parallelism.zero if mesh.dp_shard > 1 else 0
    numel, shard_numel = stage.numel, stage.compute_shard_numel(mesh)
    gathered_numel = float(numel)
    if zero > 2:  # FSDP2 gathers the next layer during the computation of one
        gathered_numel = float(stage.non_layer_numel + stage.largest_pair_numel)
    # Master weights, if any, can be the sharded copy of the gathered weights
    has_sharded_copy = zero > 1 and config.precision.master_weight_dtype is None
    updated_numel = shard_numel if zero else numel
    gradient_numel = float(numel if _is_nxd(config) else stage.largest_numel)
    is_snapshot_on_device = config.hardware.memory_gib is None and config.checkpoint.asynchronous
    state_bytes = stage.compute_state_bytes(config, mesh)
    master_bytes = bytes_per_parameter.master_weights
    saved_bytes = updated_numel * (master_bytes or bytes_per_parameter.weights) + state_bytes
    return MemoryEstimate(
        weights=(gathered_numel + (shard_numel if has_sharded_copy else 0.0))
        * bytes_per_parameter.weights,
        gradients=gradient_numel * bytes_per_parameter.transient_gradients,
        accumulation=(shard_numel if zero > 1 else numel) * bytes_per_parameter.gradients,
        master_weights=updated_numel * master_bytes,
        optimizer_state=state_bytes,
        activations=0.0,
        logits=0.0,
        working=0.0,
        collectives=0.0,
        saving=saved_bytes if is_snapshot_on_device else 0.0,
        process=_estimate_process_bytes(config, mesh),
        reserve=_estimate_reserved_bytes(config, mesh),
    )


def _estimate_reserved_bytes(config: Config, mesh: ParallelDegrees) -> float:
    """Return the bytes of the device that are not available for tensors."""
    gib = RESERVED_MEMORY_GIB.get(config.hardware.name, 0.0)
    if get_kernel_backend(config) is KernelBackend.gpu:
        sizes = [mesh.tp, mesh.pp, mesh.dp, mesh.ep]
        if mesh.dp_replicate > 1:
            sizes += [mesh.dp_shard, mesh.dp_replicate]
        gib = CUDA_CONTEXT_GIB + NCCL_GROUP_GIB * sum(size > 1 for size in sizes)
        gib += NCCL_ALL_TO_ALL_GIB if mesh.ep > 1 else 0.0
    return gib * 2**30


def _estimate_process_bytes(config: Config, mesh: ParallelDegrees) -> float:
    """Return the bytes of interpreter and libraries, if devices share memory with their host."""
    name, layout = config.hardware.name, config.parallelism
    gib = PROCESS_MEMORY_GIB.get(name, 0.0)
    if config.compiler.torch_compile or layout.pp > 1 or (layout.zero > 1 and mesh.dp > 1):
        gib += COMPILER_MEMORY_GIB.get(name, 0.0)
    return gib * 2**30


def _estimate_layer_gradient_bytes(
    config: Config, mesh: ParallelDegrees, stage: PipelineStageShard
) -> float:
    """Return the bytes of a layer's gradients, which FSDP2 sends during the pass of the next."""
    precision = config.precision
    if config.parallelism.zero < 2 or mesh.dp == 1:
        return 0.0
    itemsizes = get_itemsize(precision.grad_dtype) + get_itemsize(precision.reduce_dtype)
    return float(max(stage.layer_numels) * itemsizes)


def _estimate_collective_buffer_bytes(config: Config, mesh: ParallelDegrees) -> float:
    """Return the bytes of send and receive buffers.

    Tensor parallelism gathers a micro batch's hidden states. NxD's ZeRO-1 sends gradients in
    buckets.
    """
    buffers = 2.0 * compute_hidden_bytes(config) if mesh.tp > 1 else 0.0
    if config.parallelism.zero == 1 and mesh.dp > 1 and _is_nxd(config):
        buffers += 2 * _NXD_BUCKET_BYTES
    return buffers


def _estimate_pipeline_buffer_bytes(
    config: Config, mesh: ParallelDegrees, stage: PipelineStageShard, in_flight: float
) -> float:
    """Return the bytes of tensors that stages exchange, and that no layer saves.

    These are the outputs of all passes in flight, which the last stage does not send, an input that
    is received in advance, and a received and a sent gradient.
    """
    if mesh.pp == 1:
        return 0.0
    layout = config.parallelism
    num_outputs = in_flight * layout.stages_per_rank - (in_flight if stage.is_last else 0)
    num_token_shards = mesh.tp if layout.sequence_parallel else 1
    return (num_outputs + 3) * compute_hidden_bytes(config) / num_token_shards
