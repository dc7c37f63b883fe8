"""Peak memory of one device, by term.

Terms follow from shape, parallel layout and precision recipe. docs/planning.md derives each and
compares them with measurements.
"""

import os
from dataclasses import dataclass

from hlat.config.engine import EngineBackend
from hlat.config.parallelism import ActivationCheckpointing, PipelineSchedule
from hlat.config.precision import Fp32Operator, PrecisionConfig
from hlat.config.run import Config
from hlat.model.parameter_specs import count_parameters, logit_chunk_size
from hlat.parallelism.mesh_coordinates import ParallelDegrees, compute_parallel_degrees
from hlat.plan.hardware_efficiency import RESERVED_MEMORY_GIB, get_planned_engine
from hlat.plan.stage_shards import (
    StageShard,
    build_stage_shards,
    compute_hidden_bytes,
    count_micro_batch_tokens,
)
from hlat.precision.precision_bytes import compute_bytes_per_parameter, get_itemsize

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
        moments: Both Adam moments.
        activations: Activations saved for backward, of all micro batches in flight.
        logits: Logits of one chunk and the gradient of the head.
        working: Temporaries of a layer's backward pass, beyond `logits`.
        collectives: Send and receive buffers.
        saving: Snapshot of an asynchronous save, if it is on the device.
        reserve: Runtime and programs.
    """

    weights: float
    gradients: float
    accumulation: float
    master_weights: float
    moments: float
    activations: float
    logits: float
    working: float
    collectives: float
    saving: float
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
    stages = build_stage_shards(config.model, mesh)
    estimates = (_estimate_stage(config, mesh, rank, stage) for rank, stage in enumerate(stages))
    return max(estimates, key=lambda estimate: estimate.total)


def get_device_memory_bytes(config: Config) -> float:
    """Return the configured memory of a device, or a process's part of this host's memory."""
    hardware = config.hardware
    if hardware.memory_gib is not None:
        return hardware.memory_gib * 2**30
    host_bytes = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return host_bytes * hardware.nodes / config.num_processes


def compute_checkpoint_bytes(config: Config) -> int:
    """Return the bytes of one checkpoint: (master) weights and both moments.

    Headers, hashes and the data position, some hundred bytes per tensor, are not included.
    """
    return count_parameters(config.model) * _compute_saved_bytes_per_parameter(config.precision)


def _compute_saved_bytes_per_parameter(precision: PrecisionConfig) -> int:
    updated = precision.master_weights or precision.weights
    return get_itemsize(updated) + 2 * get_itemsize(precision.optimizer_state)


def count_saved_activations_per_token(
    config: Config, mesh: ParallelDegrees, stage: StageShard
) -> float:
    """Return the elements that a layer saves for backward per token without checkpointing.

    The inputs of both norms, 2 h, sharded by sequence parallelism; the inputs of q/k/v and gate/up,
    2 h, which NxD also shards and gathers again, while PyTorch saves the gathered tensor; the input
    of the output projection, h; q, k and v before and after rotation, 2 h + 3 h_kv (v is a view of
    the fused tensor); gate, up and their product, 3 I. After Korthikanti et al., arXiv 2205.05198,
    section 4, for SwiGLU without dropout.
    """
    model, tp = config.model, mesh.tp
    norm_inputs = 1 / tp if config.parallelism.sequence_parallel else 1.0
    matmul_inputs = norm_inputs if _is_nxd(config) else 1.0
    kv_size = stage.num_kv_heads * model.head_dim
    sharded = (3 * model.hidden_size + 3 * model.intermediate_size) / tp + 3 * kv_size
    return 2 * model.hidden_size * (norm_inputs + matmul_inputs) + sharded


def count_micro_batches_in_flight(config: Config, mesh: ParallelDegrees, rank: int) -> float:
    """Return the maximum number of micro batches whose activations a pipeline rank stores.

    p - rank under 1F1B; with v stages per rank (p - 1)/(p v) as many more (arXiv 2205.05198,
    section 4.2.3).
    """
    in_flight = float(mesh.pp - rank)
    if config.parallelism.pipeline_schedule is not PipelineSchedule.one_f_one_b:
        in_flight += (mesh.pp - 1) / config.parallelism.stages_per_rank
    return min(config.num_micro_batches, in_flight)


def _is_nxd(config: Config) -> bool:
    return get_planned_engine(config) is EngineBackend.nxd


def _estimate_stage(
    config: Config, mesh: ParallelDegrees, rank: int, stage: StageShard
) -> MemoryEstimate:
    bytes_per_parameter = compute_bytes_per_parameter(config.precision)
    zero = config.parallelism.zero if mesh.dp > 1 else 0
    numel, shard_numel = stage.numel, stage.numel / mesh.dp
    gathered_numel = float(numel)
    if zero > 2:  # FSDP2 gathers the next layer during the computation of one
        gathered_numel -= stage.layer_numel * max(0, stage.num_layers - 2)
    # Master weights, if any, can be the sharded copy of the gathered weights
    has_sharded_copy = zero > 1 and config.precision.master_weights is None
    updated_numel = shard_numel if zero else numel
    logits = _estimate_logit_bytes(config, mesh) if stage.is_last else 0.0
    gradient_numel = float(numel if _is_nxd(config) else stage.largest_numel)
    is_snapshot_on_device = config.hardware.memory_gib is None and config.checkpoint.asynchronous
    saved_bytes = _compute_saved_bytes_per_parameter(config.precision)
    return MemoryEstimate(
        weights=(gathered_numel + (shard_numel if has_sharded_copy else 0.0))
        * bytes_per_parameter.weights,
        gradients=gradient_numel * bytes_per_parameter.transient_gradients,
        accumulation=(shard_numel if zero > 1 else numel) * bytes_per_parameter.gradients,
        master_weights=updated_numel * bytes_per_parameter.master_weights,
        moments=updated_numel * bytes_per_parameter.moments,
        activations=_estimate_activation_bytes(config, mesh, rank, stage),
        logits=logits,
        working=max(0.0, _estimate_workspace_bytes(config, mesh, stage) - logits),
        collectives=_estimate_collective_buffer_bytes(config, mesh, stage, zero),
        saving=updated_numel * saved_bytes if is_snapshot_on_device else 0.0,
        reserve=RESERVED_MEMORY_GIB.get(config.hardware.name, 0.0) * 2**30,
    )


def _estimate_activation_bytes(
    config: Config, mesh: ParallelDegrees, rank: int, stage: StageShard
) -> float:
    """Return the bytes that the layers of a stage save for backward.

    Selective checkpointing recomputes attention and the product of gate and up; full checkpointing
    saves only a layer's input. Unfused attention saves its probabilities. With data.document_mask,
    all layers share a mask of s elements per token.
    """
    model, layout = config.model, config.parallelism
    saved = count_saved_activations_per_token(config, mesh, stage)
    elements = {
        ActivationCheckpointing.none: saved + _count_attention_scores_per_token(config, mesh),
        ActivationCheckpointing.selective: saved - model.intermediate_size / mesh.tp,
        ActivationCheckpointing.full: model.hidden_size
        / (mesh.tp if layout.sequence_parallel else 1),
    }[layout.activation_checkpointing]
    mask = config.batch.sequence_length if config.data.document_mask else 0
    num_tokens = count_micro_batch_tokens(config) * count_micro_batches_in_flight(
        config, mesh, rank
    )
    return (
        num_tokens * (stage.num_layers * elements + mask) * get_itemsize(config.precision.compute)
    )


def _estimate_workspace_bytes(config: Config, mesh: ParallelDegrees, stage: StageShard) -> float:
    """Return the bytes of temporaries in the backward pass of one layer.

    Gradients of the SwiGLU product, of gate and of up, copies of gate and silu(gate), and the two
    gradients concatenated: 7 I; recomputed activations; unfused attention probabilities and their
    gradient, in fp32 if the softmax is.
    """
    model, precision = config.model, config.precision
    intermediate, compute = model.intermediate_size / mesh.tp, get_itemsize(precision.compute)
    recomputed = {
        ActivationCheckpointing.none: 0.0,
        ActivationCheckpointing.selective: intermediate,
        ActivationCheckpointing.full: count_saved_activations_per_token(config, mesh, stage),
    }[config.parallelism.activation_checkpointing]
    softmax = 4 if Fp32Operator.softmax in precision.fp32_operators else compute
    scores = _count_attention_scores_per_token(config, mesh) * (compute + 2 * softmax)
    return count_micro_batch_tokens(config) * ((7 * intermediate + recomputed) * compute + scores)


def _count_attention_scores_per_token(config: Config, mesh: ParallelDegrees) -> float:
    """Return the attention probabilities per token on one rank; 0 for fused attention."""
    if not _is_nxd(config):
        return 0.0
    return config.model.num_attention_heads / mesh.tp * config.batch.sequence_length


def _estimate_collective_buffer_bytes(
    config: Config, mesh: ParallelDegrees, stage: StageShard, zero: int
) -> float:
    """Return the bytes of send and receive buffers.

    Tensor parallelism gathers a micro batch's hidden states. NxD's ZeRO-1 sends gradients in
    buckets; FSDP2 sends those of a layer during the computation of the next.
    """
    precision, hidden = config.precision, compute_hidden_bytes(config)
    buffers = 2.0 * hidden if mesh.tp > 1 else 0.0
    if zero == 1 and _is_nxd(config):
        buffers += 2 * _NXD_BUCKET_BYTES
    if zero > 1:
        itemsizes = get_itemsize(precision.gradients) + get_itemsize(precision.reduction)
        buffers += stage.layer_numel * itemsizes
    if mesh.pp > 1:  # activations and gradients, sent and received
        buffers += 4 * hidden / (mesh.tp if config.parallelism.sequence_parallel else 1)
    return buffers


def _estimate_logit_bytes(config: Config, mesh: ParallelDegrees) -> float:
    """Return the bytes of a chunk of logits and of the head's gradient.

    Logits become their gradient in place, or via an fp32 copy. The head's gradient is accumulated
    over chunks in the same dtype, then rounded. NxD computes all logits at once, and stores them
    and their gradient in the dtype of the loss.
    """
    model, precision = config.model, config.precision
    compute = get_itemsize(precision.compute)
    softmax = 4 if Fp32Operator.loss in precision.fp32_operators else compute
    num_tokens, width = count_micro_batch_tokens(config), model.vocab_size / mesh.tp
    head = model.vocab_size * model.hidden_size / mesh.tp
    if _is_nxd(config):
        return num_tokens * width * (compute + 2 * softmax) + head * compute
    cast = softmax if softmax > compute else 0
    return (min(num_tokens, logit_chunk_size(int(width))) * width + head) * (compute + cast)
