"""Time of a training step by part, on the slowest rank.

    step = micro batches x (computation + tensor- and expert-parallel collectives + sends) + bubble
           + exposed data-parallel collectives + optimizer

Sequential parts are added. The native engine gathers weights and reduces gradients during the
computation; NxD reduces gradients after the backward pass. docs/planning.md derives each part.

Sources: Megatron-LM, arXiv 2104.04473, section 2.2 (bubble); zero bubble, 2401.10241; FSDP,
2304.11277, section 3.3 (overlap).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from hlat.config import mfu
from hlat.config.config_errors import ConfigError
from hlat.config.engine import EngineBackend
from hlat.config.parallelism import PipelineSchedule
from hlat.config.run import Config
from hlat.distributed.mesh_coordinates import ParallelDegrees, compute_parallel_degrees
from hlat.model import decoder_spec
from hlat.plan import communication_bytes, communication_time, update_cost
from hlat.plan.achieved_speed import AchievedSpeed, compute_achieved_speed, get_efficiency
from hlat.plan.compute_time import ComputeTime, compute_stage_time
from hlat.plan.framework_traits import HLAT, FrameworkTraits
from hlat.plan.hardware_efficiency import get_planned_engine
from hlat.plan.pipeline_stage_shards import PipelineStageShard, build_stage_shards

_BUBBLE_FRACTION = {PipelineSchedule.zero_bubble: 1 / 3}
"""Fraction of 1F1B's bubble; weight gradients, a third of the work, fill the rest."""
_BACKWARD_SHARE = 2 / 3
"""Share of the backward pass in the computation of a micro batch."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part, on the slowest rank.

    Attributes:
        compute: Matmuls of all micro batches, including recomputation.
        attention: Attention scores and weighted values.
        elementwise: Other operators, limited by memory bandwidth.
        tensor_parallel: Collectives within layers.
        sends: Activations and their gradients between pipeline stages.
        bubble: Idle time of the pipeline.
        reduction: Data-parallel collectives that are not overlapped, and copies of their buffers.
        optimizer: Update of the weights.
        hidden: Overlapped data-parallel collectives, not part of the total.
        expert_parallel: All-to-alls of the inputs and outputs of experts.
    """

    compute: float
    attention: float = 0.0
    elementwise: float = 0.0
    tensor_parallel: float = 0.0
    sends: float = 0.0
    bubble: float = 0.0
    reduction: float = 0.0
    optimizer: float = 0.0
    hidden: float = 0.0
    expert_parallel: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(float(part) for part in vars(self).values()) - self.hidden


@dataclass(frozen=True)
class StageTime:
    """Seconds of a pipeline stage for one micro batch, without sends."""

    compute: ComputeTime
    tensor_parallel: float
    expert_parallel: float

    @cached_property
    def total(self) -> float:
        """Seconds of all parts."""
        return self.compute.total + self.tensor_parallel + self.expert_parallel


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
    return StepTime(per_token * config.batch.tokens_per_step / (peak * assumed_mfu))


def compute_step_time(
    config: Config, speed: AchievedSpeed, traits: FrameworkTraits = HLAT
) -> StepTime:
    """Return the time of a step at a speed."""
    mesh = compute_parallel_degrees(config.parallelism, config.num_processes)
    stages = build_stage_shards(config.model, mesh, config.parallelism.stages_per_rank)
    times = compute_stage_times(config, mesh, stages, speed, traits)
    largest = find_largest_stage(stages)
    update_s = compute_optimizer_time(config, mesh, largest, speed)
    return add_times(config, mesh, times, largest, update_s, speed, traits)


def find_largest_stage(stages: Iterable[PipelineStageShard]) -> PipelineStageShard:
    """Return the stage with the most weights."""
    return max(stages, key=lambda stage: stage.numel)


def compute_stage_times(
    config: Config,
    mesh: ParallelDegrees,
    stages: Sequence[PipelineStageShard],
    speed: AchievedSpeed,
    traits: FrameworkTraits,
) -> list[StageTime]:
    """Return the time of each stage for one micro batch.

    It does not depend on ZeRO stage and pipeline schedule.
    """
    times = {stage: _compute_stage_time(config, mesh, stage, speed, traits) for stage in {*stages}}
    return [times[stage] for stage in stages]


def add_times(
    config: Config,
    mesh: ParallelDegrees,
    times: Sequence[StageTime],
    largest: PipelineStageShard,
    update_s: float,
    speed: AchievedSpeed,
    traits: FrameworkTraits,
) -> StepTime:
    """Return the time of a step, given those of the stages and of the update of the largest one."""
    sends = communication_time.compute_pipeline_time(config, mesh, speed)
    slots = [time.total + sends for time in times]
    longest = max(slots)
    slowest = times[slots.index(longest)]
    num_micro_batches, layout = config.num_micro_batches, config.parallelism
    bubble = _BUBBLE_FRACTION.get(layout.pipeline_schedule, 1.0) / layout.stages_per_rank
    reduction = communication_time.compute_data_parallel_time(config, mesh, largest, speed, traits)
    over_replicas = communication_time.compute_replica_time(config, mesh, largest, speed)
    hidden = _compute_overlap(config, reduction, over_replicas, slowest, speed)
    reduction += over_replicas
    if mesh.dp_shard > 1:
        reduction += communication_bytes.compute_copied_bytes(config, largest) / speed.memory
    return StepTime(
        compute=num_micro_batches * slowest.compute.matmuls,
        attention=num_micro_batches * slowest.compute.attention,
        elementwise=num_micro_batches * slowest.compute.elementwise,
        tensor_parallel=num_micro_batches * slowest.tensor_parallel,
        sends=num_micro_batches * sends,
        bubble=(sum(slots) - longest) * bubble,
        reduction=reduction - hidden,
        optimizer=update_s,
        hidden=hidden,
        expert_parallel=num_micro_batches * slowest.expert_parallel,
    )


def _compute_stage_time(
    config: Config,
    mesh: ParallelDegrees,
    stage: PipelineStageShard,
    speed: AchievedSpeed,
    traits: FrameworkTraits,
) -> StageTime:
    tensor = communication_time.compute_tensor_parallel_time(config, mesh, stage, speed)
    tensor *= traits.tensor_parallel_volume * (1 - traits.tensor_parallel_overlap)
    context = communication_time.compute_context_parallel_time(config, mesh, stage, speed, traits)
    return StageTime(
        compute=compute_stage_time(config, mesh, stage, speed, traits),
        tensor_parallel=tensor + context,
        expert_parallel=communication_time.compute_expert_parallel_time(config, mesh, stage, speed),
    )


def _compute_overlap(
    config: Config,
    reduction: float,
    over_replicas: float,
    slowest: StageTime,
    speed: AchievedSpeed,
) -> float:
    """Return the seconds of data-parallel collectives that overlap with computation.

    ZeRO 0 and 1 reduce gradients during the backward pass of the last micro batch. ZeRO 2 and 3
    communicate in each micro batch, ZeRO 3 also in its forward pass, and sum over replicas in the
    backward pass of the last micro batch. ZeRO 1 sums over replicas after it.
    """
    if get_planned_engine(config) is not EngineBackend.native:
        return 0.0
    zero, compute = config.parallelism.zero, slowest.compute.total + slowest.tensor_parallel
    if zero > 1:
        reduction += min(over_replicas, compute * _BACKWARD_SHARE)
    if zero < 3:
        compute *= _BACKWARD_SHARE
    if zero > 1:
        compute *= config.num_micro_batches
    return speed.efficiency.overlap * min(reduction, compute)


def compute_optimizer_time(
    config: Config, mesh: ParallelDegrees, stage: PipelineStageShard, speed: AchievedSpeed
) -> float:
    """Return the seconds of the update of a rank's weights."""
    elementwise = max(
        update_cost.compute_optimizer_flops(config, mesh, stage) / speed.vector_flops,
        update_cost.compute_optimizer_bytes(config, mesh, stage) / speed.memory,
    )
    matrices = update_cost.compute_matrix_update_flops(config, mesh, stage) / speed.flops
    exchanged = update_cost.compute_matrix_exchange_bytes(config, mesh, stage)
    bandwidth = communication_time.get_bandwidth(config, mesh.dp * mesh.tp - 1, speed)
    return elementwise + matrices + exchanged / bandwidth
