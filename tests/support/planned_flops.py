"""FLOPs of a rank in the planner: its time at one FLOP per second."""

import math

from hlat.config.run import Config
from hlat.distributed.mesh_coordinates import ParallelDegrees
from hlat.plan.achieved_speed import AchievedSpeed
from hlat.plan.compute_time import compute_stage_time
from hlat.plan.framework_traits import HLAT
from hlat.plan.hardware_efficiency import HardwareEfficiency
from hlat.plan.pipeline_stage_shards import PipelineStageShard

UNIT_SPEED = AchievedSpeed(
    flops=1.0,
    layer_flops=1.0,
    attention_flops=1.0,
    vector_flops=math.inf,
    memory=1.0,
    link=1.0,
    network=1.0,
    passes=0.0,
    efficiency=HardwareEfficiency(1, 1, 1, "one FLOP per second"),
)


def count_flops(config: Config, mesh: ParallelDegrees, stage: PipelineStageShard) -> float:
    """Return the FLOPs of one rank of a stage for one micro batch."""
    return compute_stage_time(config, mesh, stage, UNIT_SPEED, HLAT).total
