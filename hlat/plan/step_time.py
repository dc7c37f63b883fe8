"""Time of a training step by part, on the slowest rank.

    step = micro batches x (compute + tensor- and expert-parallel traffic + sends) + bubble
           + exposed data-parallel reduction + optimizer

Sequential parts are added. The native engine reduces a gradient when it is complete, so the
reduction overlaps with the backward pass of the last micro batch; that of NxD starts after it.
docs/planning.md derives each part.

Sources: Megatron-LM, arXiv 2104.04473, section 2.2 (bubble); 2205.05198, section 4.2 (sequence
parallelism); ZeRO, 1910.02054, section 7 (traffic of its stages); zero bubble, 2401.10241.
"""

import math
from dataclasses import dataclass

from hlat.config import mfu
from hlat.config.config_errors import ConfigError, raise_config_errors
from hlat.config.engine import EngineBackend
from hlat.config.parallelism import ActivationCheckpointing, PipelineSchedule
from hlat.config.precision import Dtype
from hlat.config.run import Config
from hlat.distributed.mesh_coordinates import ParallelDegrees, compute_parallel_degrees
from hlat.model import decoder_spec
from hlat.model.mlp_spec import get_mlp_spec
from hlat.optim.optimizer_spec import (
    EMA_UPDATE_FLOPS,
    compute_joint_shape,
    get_optimizer_spec,
    group_matrices,
)
from hlat.plan.hardware_efficiency import EFFICIENCIES, HardwareEfficiency, get_planned_engine
from hlat.plan.pipeline_stage_shards import (
    PipelineStageShard,
    build_stage_shards,
    compute_hidden_bytes,
    count_micro_batch_tokens,
)
from hlat.precision.precision_bytes import (
    compute_state_bytes,
    compute_update_bytes,
    get_itemsize,
)

_BUBBLE_FRACTION = {PipelineSchedule.zero_bubble: 1 / 3}
"""Fraction of 1F1B's bubble; weight gradients, a third of the work, fill the rest."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part, on the slowest rank.

    Attributes:
        compute: Computation of all micro batches, including recomputation.
        tensor_parallel: Collectives within layers.
        sends: Activations and their gradients between pipeline stages.
        bubble: Idle time of the pipeline.
        reduction: Data-parallel collectives that are not overlapped.
        optimizer: Update of the weights.
        hidden: Overlapped data-parallel collectives, not part of the total.
        expert_parallel: All-to-alls of the inputs and outputs of experts.
    """

    compute: float
    tensor_parallel: float
    sends: float
    bubble: float
    reduction: float
    optimizer: float
    hidden: float
    expert_parallel: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(float(part) for part in vars(self).values()) - self.hidden


@dataclass(frozen=True)
class AchievedSpeed:
    """Achieved FLOP/s and bytes/s of a rank; link and network include its efficiency.

    Attributes:
        flops: Speed of matmuls.
        vector_flops: Speed of element-wise operations in fp32; infinite if it is unknown.
    """

    flops: float
    vector_flops: float
    memory: float
    link: float
    network: float


def predict_step_time(config: Config) -> StepTime:
    """Return the time of a step; raise ConfigError if a property of the hardware is unknown."""
    return compute_step_time(config, compute_achieved_speed(config, get_efficiency(config)))


def assume_step_time(config: Config, assumed_mfu: float) -> StepTime:
    """Return the time of a step at an assumed MFU, all of it as computation.

    Raises:
        ConfigError: The peak of the hardware is unknown.
    """
    hardware, dtype = config.hardware, config.precision.compute_dtype
    peak = mfu.compute_peak_flops(hardware, config.num_processes, dtype)
    if peak is None:
        raise ConfigError(
            f"hardware.peak_tflops.{dtype.value} is unknown, so is the step time at "
            f"mfu={assumed_mfu:g}; set it to the dense peak of the data sheet"
        )
    per_token = decoder_spec.compute_flops_per_token(config.model, config.batch.sequence_length)
    seconds = per_token * config.batch.tokens_per_step / (peak * assumed_mfu)
    return StepTime(
        seconds, tensor_parallel=0, sends=0, bubble=0, reduction=0, optimizer=0, hidden=0
    )


def get_efficiency(config: Config) -> HardwareEfficiency:
    """Return the constants of the run's hardware; raise ConfigError if there are none."""
    name = config.hardware.name
    if name not in EFFICIENCIES:
        raise ConfigError(
            f"hardware={name} has no constants in hlat/plan/hardware_efficiency.py, so its step "
            f"time is unknown; assume one with mfu=0.4, or use {', '.join(EFFICIENCIES)}"
        )
    return EFFICIENCIES[name]


def compute_achieved_speed(config: Config, efficiency: HardwareEfficiency) -> AchievedSpeed:
    """Return the speed of a rank: the hardware's peak times its efficiency.

    Raises:
        ConfigError: If a peak is unknown.
    """
    hardware, dtype = config.hardware, config.precision.compute_dtype
    peaks = {
        f"peak_tflops.{dtype.value}": mfu.compute_peak_flops(hardware, 1, dtype),
        "memory_bandwidth_gb_per_s": hardware.memory_bandwidth_gb_per_s,
        "link_gb_per_s": hardware.link_gb_per_s,
        "network_gbit_per_s": hardware.network_gbit_per_s,
    }
    missing = [key for key, peak in peaks.items() if peak is None]
    raise_config_errors(f"hardware.{key} is unknown, so is the step time" for key in missing)
    flops, memory, link, network = (peak or 0.0 for peak in peaks.values())
    return AchievedSpeed(
        flops=flops * efficiency.compute,
        vector_flops=mfu.compute_peak_flops(hardware, 1, Dtype.fp32) or math.inf,
        memory=memory * 1e9,
        link=link * 1e9 * efficiency.link,
        network=network * 1e9 / 8 * efficiency.network,
    )


def compute_step_time(config: Config, speed: AchievedSpeed) -> StepTime:
    """Return the time of a step at a speed."""
    mesh = compute_parallel_degrees(config.parallelism, config.num_processes)
    stages = build_stage_shards(config.model, mesh)
    flops = {stage: compute_forward_backward_flops(config, mesh, stage) for stage in {*stages}}
    compute = [flops[stage] / speed.flops for stage in stages]
    tp_bandwidth = _get_bandwidth(config, mesh.tp - 1, speed)
    tensor_parallel = [
        compute_tensor_parallel_bytes(config, mesh, stage) / tp_bandwidth for stage in stages
    ]
    ep_bandwidth = _get_bandwidth(config, mesh.ep * mesh.tp - 1, speed)
    expert_parallel = [
        compute_expert_parallel_bytes(config, mesh, stage) / ep_bandwidth for stage in stages
    ]
    pp_bandwidth = _get_bandwidth(config, mesh.dp * mesh.tp, speed)
    sends = compute_pipeline_bytes(config, mesh) / pp_bandwidth
    parts = zip(compute, tensor_parallel, expert_parallel, strict=True)
    slots = [sum(parts_of_stage) + sends for parts_of_stage in parts]
    slowest = slots.index(max(slots))
    num_micro_batches, layout = config.num_micro_batches, config.parallelism
    bubble = _BUBBLE_FRACTION.get(layout.pipeline_schedule, 1.0) / layout.stages_per_rank
    largest = max(stages, key=lambda stage: stage.numel)
    reduction = _compute_reduction_time(config, mesh, largest, speed)
    backward = (compute[slowest] + tensor_parallel[slowest]) * 2 / 3
    hidden = min(reduction, backward) if get_planned_engine(config) is EngineBackend.native else 0.0
    return StepTime(
        compute=num_micro_batches * compute[slowest],
        tensor_parallel=num_micro_batches * tensor_parallel[slowest],
        sends=num_micro_batches * sends,
        bubble=(sum(slots) - slots[slowest]) * bubble,
        reduction=reduction - hidden,
        optimizer=max(
            compute_optimizer_flops(config, mesh, largest) / speed.vector_flops,
            compute_optimizer_bytes(config, mesh, largest) / speed.memory,
        )
        + compute_matrix_update_flops(config, mesh, largest) / speed.flops
        + compute_matrix_exchange_bytes(config, mesh, largest)
        / _get_bandwidth(config, mesh.dp * mesh.tp - 1, speed),
        hidden=hidden,
        expert_parallel=num_micro_batches * expert_parallel[slowest],
    )


def compute_forward_backward_flops(
    config: Config, mesh: ParallelDegrees, stage: PipelineStageShard
) -> float:
    """Return the FLOPs of one rank for one micro batch.

    Three times the forward pass, as hlat.model.decoder_spec.compute_flops_per_token counts, for
    the rank's weights, so replicated key/value heads count on each rank. Selective checkpointing
    computes attention once more, full checkpointing the whole layer.
    """
    model, mode = config.model, config.parallelism.activation_checkpointing
    flops_per_token = (
        3 * decoder_spec.compute_output_flops(model, mesh.tp) if stage.is_last else 0.0
    )
    for layer, count in stage.layers:
        flops = decoder_spec.compute_layer_flops(
            model, layer, config.batch.sequence_length, mesh.tp
        )
        recomputed = {
            ActivationCheckpointing.none: 0.0,
            ActivationCheckpointing.selective: flops.scores,
            ActivationCheckpointing.full: flops.total,
        }[mode]
        flops_per_token += count * (3 * flops.total + recomputed)
    return count_micro_batch_tokens(config) * flops_per_token


def compute_tensor_parallel_bytes(
    config: Config, mesh: ParallelDegrees, stage: PipelineStageShard
) -> float:
    """Return the bytes that a rank sends to its tensor-parallel group for one micro batch.

    Forward and backward each have an all-gather and a reduce-scatter per tensor-parallel region, of
    which a layer has two, with (tp - 1)/tp of the activations each; without sequence parallelism an
    all-reduce is one of each. NxD saves sharded activations and gathers them again for the
    gradients of weights. Embedding and head have one collective in each direction.
    """
    layout = config.parallelism
    per_region = 4
    if layout.sequence_parallel and get_planned_engine(config) is EngineBackend.nxd:
        per_region += 1
    if layout.activation_checkpointing is ActivationCheckpointing.full:
        per_region += 2
    num_collectives = per_region * stage.num_regions + 2 * (stage.is_first + stage.is_last)
    return compute_hidden_bytes(config) * (mesh.tp - 1) / mesh.tp * num_collectives


def compute_pipeline_bytes(config: Config, mesh: ParallelDegrees) -> float:
    """Return the bytes that a rank sends to adjacent stages for one micro batch, both ways."""
    if mesh.pp == 1:
        return 0.0
    layout = config.parallelism
    num_shards = mesh.tp if layout.sequence_parallel else 1
    return 2 * compute_hidden_bytes(config) / num_shards * layout.stages_per_rank


def compute_data_parallel_bytes(
    config: Config, mesh: ParallelDegrees, stage: PipelineStageShard
) -> float:
    """Return the bytes that a rank sends along its data-parallel rings in a step.

    The ring of experts has the n = dp / ep ranks with the same ones, that of other weights n = dp.

    ZeRO stage 0 reduce-scatters and all-gathers gradients, (n - 1)/n of them each. From stage 1 on
    weights are gathered instead; from stage 2 on each micro batch reduce-scatters and gathers; in
    stage 3 each gathers the weights of layers twice.
    """
    in_layers = sum(stage.layer_numels)
    experts, others = stage.expert_numel, stage.numel - stage.expert_numel
    num_replicas = mesh.dp // mesh.ep
    sent_experts = _compute_ring_bytes(config, experts, experts)
    sent_others = _compute_ring_bytes(config, others, in_layers - experts)
    return sent_others * (mesh.dp - 1) / mesh.dp + sent_experts * (num_replicas - 1) / num_replicas


def _compute_ring_bytes(config: Config, numel: int, layer_numel: int) -> float:
    """Return the bytes that weights, some of them in layers, send along an endless ring."""
    num_micro_batches = config.num_micro_batches
    gradients = numel * get_itemsize(config.precision.reduce_dtype)
    weight_itemsize = get_itemsize(config.precision.param_dtype)
    weights, layer_weights = numel * weight_itemsize, layer_numel * weight_itemsize
    return {
        0: 2 * gradients,
        1: gradients + weights,
        2: num_micro_batches * (gradients + weights),
        3: num_micro_batches * (gradients + weights + layer_weights),
    }[config.parallelism.zero]


def compute_expert_parallel_bytes(
    config: Config, mesh: ParallelDegrees, stage: PipelineStageShard
) -> float:
    """Return the bytes that a rank sends to its expert-parallel group for one micro batch.

    Forward and backward each have two all-to-alls per layer, of the inputs and the outputs of the
    selected experts, of which (ep - 1)/ep are on other ranks if the experts are balanced.
    """
    mode = config.parallelism.activation_checkpointing
    num_collectives = 6 if mode is ActivationCheckpointing.full else 4
    rows_per_token = get_mlp_spec(config.model).count_expert_rows(config.model)
    per_layer = compute_hidden_bytes(config) * rows_per_token * num_collectives
    return per_layer * stage.num_expert_layers * (mesh.ep - 1) / mesh.ep


def compute_optimizer_flops(
    config: Config, mesh: ParallelDegrees, stage: PipelineStageShard
) -> float:
    """Return the FLOPs of a rank's optimizer update, without matmuls."""
    optimizer = get_optimizer_spec(config.optimizer.name)
    return EMA_UPDATE_FLOPS * stage.count_averaged(config, mesh) + sum(
        numel * optimizer.get_update_flops(role) for role, numel in stage.iter_updated(config, mesh)
    )


def compute_matrix_update_flops(
    config: Config, mesh: ParallelDegrees, stage: PipelineStageShard
) -> float:
    """Return the FLOPs of matmuls in a rank's optimizer update.

    The stages have the FLOPs in proportion to the weights of their matrices, and the ranks of a
    stage share them equally.
    """
    optimizer = get_optimizer_spec(config.optimizer.name)
    parameters = decoder_spec.list_module_parameters(config.model)
    flops = sum(
        optimizer.count_matmul_flops(config.optimizer, specs[0].role, compute_joint_shape(specs))
        for specs in group_matrices(config.optimizer, parameters)
    )
    return flops * stage.matrix_share / (mesh.dp * mesh.tp)


def compute_matrix_exchange_bytes(
    config: Config, mesh: ParallelDegrees, stage: PipelineStageShard
) -> float:
    """Return the bytes that a rank transfers in a step so that matrices are updated as a whole.

    They are fp32 gradients, from shards to owners, and updates, from owners to all shards. Without
    ZeRO the data-parallel ranks have the same shards.
    """
    optimizer, ranks = get_optimizer_spec(config.optimizer.name), mesh.dp * mesh.tp
    numel = sum(n for role, n in stage.numels_by_role if not optimizer.is_elementwise(role))
    shards = ranks if config.parallelism.zero else mesh.tp
    itemsize = get_itemsize(optimizer.get_matrix_update_dtype(config.optimizer))
    num_copies = ranks / shards - 1 + (shards - 1) / shards
    return numel / mesh.dp * (4 * (shards - 1) / shards + itemsize * num_copies)


def compute_optimizer_bytes(
    config: Config, mesh: ParallelDegrees, stage: PipelineStageShard
) -> float:
    """Return the bytes that a rank's optimizer update reads and writes.

    The (master) weights are read again for their moving average.
    """
    optimizer, precision = get_optimizer_spec(config.optimizer.name), config.precision
    without_state = sum(
        numel
        * (
            compute_update_bytes(precision, optimizer, role)
            - 2 * compute_state_bytes(precision, optimizer, role)
        )
        for role, numel in stage.iter_updated(config, mesh)
    )
    weights = get_itemsize(precision.master_weight_dtype or precision.param_dtype)
    averaged = weights * stage.count_averaged(config, mesh)
    return without_state + 2 * stage.compute_state_bytes(config, mesh) + averaged


def count_rings_per_node(config: Config, mesh: ParallelDegrees) -> int:
    """Return the number of data-parallel rings that share a node's network.

    Ranks of a ring on the same node are adjacent in it, so the ring leaves the node once.
    """
    per_node = config.hardware.processes_per_node or config.num_processes
    ranks_per_ring = max(1, min(mesh.dp, per_node // mesh.tp))
    return max(1, per_node // ranks_per_ring)


def _compute_reduction_time(
    config: Config, mesh: ParallelDegrees, stage: PipelineStageShard, speed: AchievedSpeed
) -> float:
    """Return the seconds of all data-parallel collectives of a step."""
    sent = compute_data_parallel_bytes(config, mesh, stage)
    per_node = config.hardware.processes_per_node or config.num_processes
    if mesh.dp * mesh.tp <= per_node:
        return sent / speed.link
    return sent / (speed.network / count_rings_per_node(config, mesh))


def _get_bandwidth(config: Config, distance: int, speed: AchievedSpeed) -> float:
    """Return the bytes/s between ranks: over links, or a process's part of the node's network."""
    per_node = config.hardware.processes_per_node
    if per_node is None or distance < per_node:
        return speed.link
    return speed.network / per_node
