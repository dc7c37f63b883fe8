"""Bytes that a rank sends to its parallel groups, by axis of the mesh.

Sources: Megatron-LM, arXiv 2104.04473, section 2.2; 2205.05198, section 4.2 (sequence
parallelism); ZeRO, 1910.02054, section 7 (traffic of its stages).
"""

from hlat.config.engine import EngineBackend
from hlat.config.parallelism import ActivationCheckpointing
from hlat.config.run import Config
from hlat.distributed.mesh_coordinates import ParallelDegrees
from hlat.model.mlp_spec import get_mlp_spec
from hlat.plan.hardware_efficiency import get_planned_engine
from hlat.plan.pipeline_stage_shards import PipelineStageShard, compute_hidden_bytes
from hlat.precision.precision_bytes import get_itemsize


def compute_tensor_parallel_bytes(
    config: Config, mesh: ParallelDegrees, stage: PipelineStageShard
) -> float:
    """Return the bytes that a rank sends to its tensor-parallel group for one micro batch.

    Forward and backward each have an all-gather and a reduce-scatter per tensor-parallel region, of
    which a layer has two, with (tp - 1)/tp of the activations each; without sequence parallelism an
    all-reduce is one of each. NxD saves sharded activations and gathers them again for the
    gradients of weights. Embedding and head have one collective in each direction.
    """
    num_collectives = count_tensor_parallel_collectives(config, stage)
    return compute_hidden_bytes(config) * (mesh.tp - 1) / mesh.tp * num_collectives


def count_tensor_parallel_collectives(config: Config, stage: PipelineStageShard) -> int:
    """Return the all-gathers and reduce-scatters of a micro batch; an all-reduce is one of each."""
    layout = config.parallelism
    per_region = 4
    if layout.sequence_parallel and get_planned_engine(config) is EngineBackend.nxd:
        per_region += 1
    if layout.activation_checkpointing is ActivationCheckpointing.full:
        per_region += 2
    return per_region * stage.num_regions + 2 * (stage.is_first + stage.is_last)


def compute_pipeline_bytes(config: Config, mesh: ParallelDegrees) -> float:
    """Return the bytes that a rank sends to adjacent stages for one micro batch, both ways."""
    if mesh.pp == 1:
        return 0.0
    layout = config.parallelism
    num_shards = mesh.tp if layout.sequence_parallel else 1
    return 2 * compute_hidden_bytes(config) / num_shards * layout.stages_per_rank


def compute_data_parallel_bytes(
    config: Config, mesh: ParallelDegrees, stage: PipelineStageShard, reduces_once: bool = False
) -> float:
    """Return the bytes that a rank sends along the rings of its replica in a step.

    The ring of experts has the n = dp_shard / ep ranks with the same ones, that of other weights
    n = dp_shard, which is dp without replicas.

    ZeRO stage 0 reduce-scatters and all-gathers gradients, (n - 1)/n of them each. From stage 1 on
    weights are gathered instead; from stage 2 on each micro batch reduce-scatters and gathers; in
    stage 3 each gathers the weights of layers twice. With `reduces_once` only the last micro batch
    reduce-scatters.
    """
    in_layers = sum(stage.layer_numels)
    experts, others = stage.expert_numel, stage.numel - stage.expert_numel
    num_ranks, num_expert_ranks = mesh.dp_shard, mesh.dp_shard // mesh.ep
    sent_experts = _compute_ring_bytes(config, experts, experts, reduces_once)
    sent_others = _compute_ring_bytes(config, others, in_layers - experts, reduces_once)
    return (
        sent_others * (num_ranks - 1) / num_ranks
        + sent_experts * (num_expert_ranks - 1) / num_expert_ranks
    )


def compute_replica_bytes(
    config: Config, mesh: ParallelDegrees, stage: PipelineStageShard
) -> float:
    """Return the bytes that a rank sends in a step to all-reduce the gradients of its shard."""
    gradients = stage.compute_shard_numel(mesh) * get_itemsize(config.precision.reduce_dtype)
    return 2 * gradients * (mesh.dp_replicate - 1) / mesh.dp_replicate


def _compute_ring_bytes(config: Config, numel: int, layer_numel: int, reduces_once: bool) -> float:
    """Return the bytes that weights, some of them in layers, send along an endless ring."""
    num_micro_batches = config.num_micro_batches
    num_reductions = 1 if reduces_once else num_micro_batches
    gradients = numel * get_itemsize(config.precision.reduce_dtype)
    weight_itemsize = get_itemsize(config.precision.param_dtype)
    weights, layer_weights = numel * weight_itemsize, layer_numel * weight_itemsize
    return {
        0: 2 * gradients,
        1: gradients + weights,
        2: num_reductions * gradients + num_micro_batches * weights,
        3: num_reductions * gradients + num_micro_batches * (weights + layer_weights),
    }[config.parallelism.zero]


def compute_copied_bytes(config: Config, stage: PipelineStageShard) -> float:
    """Return the bytes that FSDP reads and writes in a step to copy weights and gradients.

    Gathered weights are copied from one buffer of a layer to the parameters, in stage 3 in the
    forward and the backward pass, and gradients to the buffer of the reduction (torch,
    distributed/fsdp/_fully_shard/_fsdp_collectives.py).
    """
    precision, zero = config.precision, config.parallelism.zero
    if zero < 2:
        return 0.0
    gradients = get_itemsize(precision.grad_dtype) + get_itemsize(precision.reduce_dtype)
    weights = 2 * get_itemsize(precision.param_dtype)
    per_weight = gradients + (weights if zero == 2 else 2 * weights)
    return config.num_micro_batches * stage.numel * per_weight


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


def count_rings_per_node(config: Config, mesh: ParallelDegrees) -> int:
    """Return the number of rings of replicas that share a node's network.

    Ranks of a ring on the same node are adjacent in it, so the ring leaves the node once.
    """
    per_node = config.hardware.processes_per_node or config.num_processes
    ranks_per_ring = max(1, min(mesh.dp_shard, per_node // mesh.tp))
    return max(1, per_node // ranks_per_ring)
