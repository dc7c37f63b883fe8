"""FLOPs and bytes of the optimizer's update on one rank."""

from hlat.config.run import Config
from hlat.distributed.mesh_coordinates import ParallelDegrees
from hlat.model import decoder_spec
from hlat.model.parameter_spec import ParameterRole
from hlat.optim.optimizer_spec import (
    EMA_UPDATE_FLOPS,
    compute_joint_shape,
    get_optimizer_spec,
    group_matrices,
)
from hlat.plan.pipeline_stage_shards import PipelineStageShard
from hlat.precision.precision_bytes import (
    compute_state_bytes,
    compute_update_bytes,
    get_itemsize,
)


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
    if all(optimizer.is_elementwise(role) for role in ParameterRole):
        return 0.0
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
    ZeRO the data-parallel ranks have the same shards, and so have replicas.
    """
    optimizer, ranks = get_optimizer_spec(config.optimizer.name), mesh.dp * mesh.tp
    numel = sum(n for role, n in stage.numels_by_role if not optimizer.is_elementwise(role))
    shards = mesh.dp_shard * mesh.tp if config.parallelism.zero else mesh.tp
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
