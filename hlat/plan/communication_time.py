"""Time of collectives by axis of the mesh: a latency, and bytes over the bandwidth of the level.

A collective of n ranks takes a constant time, the time of each hop of its ring, and its bytes over
the bandwidth of links, or of a rank's part of its node's network.

Source: latency and bandwidth of NCCL's ring algorithm, NVIDIA/nccl, src/graph/tuning.cc.
"""

from hlat.config.run import Config
from hlat.distributed.mesh_coordinates import ParallelDegrees
from hlat.plan import communication_bytes
from hlat.plan.achieved_speed import AchievedSpeed
from hlat.plan.framework_traits import FrameworkTraits
from hlat.plan.pipeline_stage_shards import PipelineStageShard, count_micro_batch_tokens
from hlat.precision.precision_bytes import get_itemsize


def compute_tensor_parallel_time(
    config: Config, mesh: ParallelDegrees, stage: PipelineStageShard, speed: AchievedSpeed
) -> float:
    """Return the seconds of all tensor-parallel collectives of a micro batch."""
    if mesh.tp == 1:
        return 0.0
    sent = communication_bytes.compute_tensor_parallel_bytes(config, mesh, stage)
    num_collectives = communication_bytes.count_tensor_parallel_collectives(config, stage)
    latency = compute_latency(config, mesh.tp, 1, speed)
    return sent / get_bandwidth(config, mesh.tp - 1, speed) + num_collectives * latency


def compute_expert_parallel_time(
    config: Config, mesh: ParallelDegrees, stage: PipelineStageShard, speed: AchievedSpeed
) -> float:
    """Return the seconds of all expert-parallel all-to-alls of a micro batch.

    A rank sends the same bytes to each other rank, first over links, then over the network.
    """
    if mesh.ep == 1:
        return 0.0
    sent = communication_bytes.compute_expert_parallel_bytes(config, mesh, stage)
    per_node = config.hardware.processes_per_node or config.num_processes
    num_local = min(mesh.ep, max(1, per_node // mesh.tp))
    local_share = (num_local - 1) / (mesh.ep - 1)
    return sent * (local_share / speed.link + (1 - local_share) * per_node / speed.network)


def compute_pipeline_time(config: Config, mesh: ParallelDegrees, speed: AchievedSpeed) -> float:
    """Return the seconds of all sends between stages of a micro batch."""
    sent = communication_bytes.compute_pipeline_bytes(config, mesh)
    return sent / get_bandwidth(config, mesh.dp * mesh.tp, speed)


def compute_context_parallel_time(
    config: Config,
    mesh: ParallelDegrees,
    stage: PipelineStageShard,
    speed: AchievedSpeed,
    traits: FrameworkTraits,
) -> float:
    """Return the exposed seconds of the exchange of keys and values of a micro batch.

    Each rank receives those of the others in the forward and the backward pass, and sends their
    gradients (ring attention, arXiv 2310.01889).
    """
    degree, model = traits.context_parallel, config.model
    if degree == 1:
        return 0.0
    num_key_values = 2 * -(-model.num_key_value_heads // mesh.tp) * model.head_dim
    per_layer = num_key_values * get_itemsize(config.precision.compute_dtype) * 3 * (degree - 1)
    sent = count_micro_batch_tokens(config) * per_layer * stage.num_layers
    seconds = sent / get_bandwidth(config, degree * mesh.tp - 1, speed)
    return (1 - speed.efficiency.overlap) * seconds


def compute_data_parallel_time(
    config: Config,
    mesh: ParallelDegrees,
    stage: PipelineStageShard,
    speed: AchievedSpeed,
    traits: FrameworkTraits,
) -> float:
    """Return the seconds of all collectives within replicas of a step, two or three per layer."""
    once = traits.reduces_once
    sent = communication_bytes.compute_data_parallel_bytes(config, mesh, stage, once)
    if mesh.dp_shard == 1:
        return 0.0
    per_layer = {0: 2, 1: 2, 2: 2 * config.num_micro_batches, 3: 3 * config.num_micro_batches}
    num_collectives = stage.num_layers * per_layer[config.parallelism.zero]
    latency = num_collectives * compute_latency(config, mesh.dp_shard, mesh.tp, speed)
    if mesh.dp_shard * mesh.tp <= (config.hardware.processes_per_node or config.num_processes):
        return latency + sent / speed.link
    num_rings = communication_bytes.count_rings_per_node(config, mesh)
    return latency + sent / min(speed.link, speed.network / num_rings)


def compute_replica_time(
    config: Config, mesh: ParallelDegrees, stage: PipelineStageShard, speed: AchievedSpeed
) -> float:
    """Return the seconds of the sums of gradients over replicas, one per layer and step."""
    if mesh.dp_replicate == 1:
        return 0.0
    stride = mesh.dp_shard * mesh.tp
    latency = 2 * stage.num_layers * compute_latency(config, mesh.dp_replicate, stride, speed)
    sent = communication_bytes.compute_replica_bytes(config, mesh, stage)
    return latency + sent / get_bandwidth(config, (mesh.dp_replicate - 1) * stride, speed)


def compute_latency(config: Config, degree: int, stride: int, speed: AchievedSpeed) -> float:
    """Return the seconds of a collective without bytes among `degree` ranks, `stride` apart."""
    per_node, efficiency = config.hardware.processes_per_node or degree, speed.efficiency
    num_nodes = max(1, degree * stride // per_node)
    hops_s = (degree - num_nodes) * efficiency.link_hop_s
    return efficiency.collective_s + hops_s + (num_nodes - 1) * efficiency.network_hop_s


def get_bandwidth(config: Config, distance: int, speed: AchievedSpeed) -> float:
    """Return the bytes/s between ranks: over links, or a process's part of the node's network."""
    per_node = config.hardware.processes_per_node
    if per_node is None or distance < per_node:
        return speed.link
    return speed.network / per_node
