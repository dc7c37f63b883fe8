"""Functions of the planner for one stage of a pipeline."""

import math
from collections.abc import Callable

from hlat.config.run import Config
from hlat.distributed.mesh_coordinates import ParallelDegrees, compute_parallel_degrees
from hlat.plan.achieved_speed import AchievedSpeed
from hlat.plan.compute_time import compute_stage_time
from hlat.plan.framework_traits import HLAT
from hlat.plan.hardware_efficiency import HardwareEfficiency
from hlat.plan.pipeline_stage_shards import PipelineStageShard, build_stage_shards

UNIT_SPEED = AchievedSpeed(
    flops=1.0,
    layer_flops=1.0,
    attention_flops=1.0,
    vector_flops=math.inf,
    memory=1.0,
    link=1.0,
    network=1.0,
    passes=0.0,
    operator_s=0.0,
    efficiency=HardwareEfficiency(1, 1, 1, "one FLOP per second"),
)


def count_flops(config: Config, mesh: ParallelDegrees, stage: PipelineStageShard) -> float:
    """Return the FLOPs of one rank of a stage for one micro batch."""
    return compute_stage_time(config, mesh, stage, UNIT_SPEED, HLAT).total


def evaluate_stage(
    function: Callable[..., float], config: Config, *arguments: PipelineStageShard
) -> float:
    """Return a formula for the given stage, or for the first one."""
    mesh = compute_parallel_degrees(config.parallelism, config.num_processes)
    return function(config, mesh, *(arguments or build_stage_shards(config.model, mesh)[:1]))
