"""Parameter counts of one rank of each pipeline stage, and settings of its execution."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from hlat.config.model import ModelConfig
from hlat.config.precision import Fp32Operator
from hlat.config.run import Config
from hlat.distributed.mesh_coordinates import ParallelDegrees
from hlat.distributed.pipeline_stages import assign_layers_to_stages
from hlat.model import decoder_spec
from hlat.model.activation_spec import ExecutionSettings
from hlat.model.parameter_spec import ModuleParameter, ParameterRole, ShardingRule
from hlat.optim.optimizer_spec import EMA, get_optimizer_spec
from hlat.plan.hardware_efficiency import get_kernel_backend
from hlat.precision.precision_bytes import (
    compute_parameter_state_bytes,
    compute_state_bytes,
    get_itemsize,
)


@dataclass(frozen=True)
class PipelineStageShard:
    """One tensor-parallel rank's shard of a pipeline stage.

    Attributes:
        layers: First layer of each kind in the model, and the number of layers of this kind.
        layer_numel: Weights of a layer.
        num_regions: Tensor-parallel regions of a layer.
        non_layer_numel: Weights outside of layers.
        numels_by_role: All weights by role of the parameter.
        largest_numel: Weights of the largest parameter.
        is_first: True for the stage with the input.
        is_last: True for the stage with the output.
    """

    layers: tuple[tuple[int, int], ...]
    layer_numel: int
    num_regions: int
    non_layer_numel: int
    numels_by_role: tuple[tuple[ParameterRole, int], ...]
    largest_numel: int
    is_first: bool
    is_last: bool

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return sum(count for _, count in self.layers)

    @property
    def numel(self) -> int:
        """Total number of weights."""
        return self.num_layers * self.layer_numel + self.non_layer_numel

    def count_owners(self, config: Config, mesh: ParallelDegrees, role: ParameterRole) -> int:
        """Return the number of data-parallel ranks that share the updates of a role's weights."""
        is_elementwise = get_optimizer_spec(config.optimizer.name).is_elementwise(role)
        return mesh.dp if config.parallelism.zero or not is_elementwise else 1

    def count_averaged(self, config: Config, mesh: ParallelDegrees) -> float:
        """Return the number of weights in the moving average that a rank updates."""
        if config.optimizer.ema_decay is None:
            return 0.0
        return self.numel / (mesh.dp if config.parallelism.zero else 1)

    def compute_state_bytes(self, config: Config, mesh: ParallelDegrees) -> float:
        """Return the bytes of optimizer state and average of the weights that a rank updates.

        The ranks of a stage share the state of whole matrices equally.
        """
        optimizer, precision = get_optimizer_spec(config.optimizer.name), config.precision
        elementwise = sum(
            numel
            * compute_state_bytes(precision, optimizer, role)
            / self.count_owners(config, mesh, role)
            for role, numel in self.numels_by_role
            if optimizer.is_elementwise(role)
        )
        elementwise += self.count_averaged(config, mesh) * get_itemsize(EMA.get_dtype(precision))
        if all(optimizer.is_elementwise(role) for role in ParameterRole):
            return elementwise
        matrices = sum(
            compute_parameter_state_bytes(precision, config.optimizer, spec)
            for spec in decoder_spec.list_parameter_specs(config.model)
            if not optimizer.is_elementwise(spec.role)
        )
        share = self.num_layers / config.model.num_layers / (mesh.dp * mesh.tp)
        return elementwise + matrices * share


def build_stage_shards(model: ModelConfig, mesh: ParallelDegrees) -> list[PipelineStageShard]:
    """Return the shard of each rank along the pipeline."""
    parameters = decoder_spec.list_layer_parameters(model)
    layer_numels = _count_local_elements(parameters, mesh)
    non_layer: list[list[ModuleParameter]] = [[] for _ in range(mesh.pp)]
    non_layer[0] += decoder_spec.list_input_parameters(model)
    non_layer[-1] += decoder_spec.list_output_parameters(model)
    if mesh.pp > 1:
        non_layer[-1] += decoder_spec.list_copied_parameters(model)
    other_numels = [_count_local_elements(others, mesh) for others in non_layer]
    layer_roles = _count_elements_by_role(parameters, mesh)
    other_roles = [_count_elements_by_role(others, mesh) for others in non_layer]
    kinds = decoder_spec.group_layers(model)
    num_regions = sum(parameter.sharding is ShardingRule.row for parameter in parameters)
    return [
        PipelineStageShard(
            layers=tuple(Counter(kinds[layers.start : layers.stop]).items()),
            layer_numel=sum(layer_numels),
            num_regions=num_regions,
            non_layer_numel=sum(other_numels[rank]),
            numels_by_role=tuple(
                (role, len(layers) * layer_roles[role] + other_roles[rank][role])
                for role in ParameterRole
            ),
            largest_numel=max(*layer_numels, *other_numels[rank]),
            is_first=rank == 0,
            is_last=rank == mesh.pp - 1,
        )
        for rank, layers in enumerate(assign_layers_to_stages(model.num_layers, mesh.pp))
    ]


def build_execution_settings(config: Config, mesh: ParallelDegrees) -> ExecutionSettings:
    """Return the settings that determine the activations of a rank."""
    precision, layout = config.precision, config.parallelism
    compute = get_itemsize(precision.compute_dtype)

    def get_operator_itemsize(operator: Fp32Operator) -> int:
        return 4 if operator in precision.fp32_operators else compute

    return ExecutionSettings(
        kernels=get_kernel_backend(config),
        checkpointing=layout.activation_checkpointing,
        tp=mesh.tp,
        sequence_parallel=layout.sequence_parallel,
        sequence_length=config.batch.sequence_length,
        has_documents=config.data.document_mask,
        compute_itemsize=compute,
        norm_itemsize=get_operator_itemsize(Fp32Operator.norm),
        softmax_itemsize=get_operator_itemsize(Fp32Operator.softmax),
        loss_itemsize=get_operator_itemsize(Fp32Operator.loss),
    )


def count_micro_batch_tokens(config: Config) -> int:
    """Return the tokens of a micro batch."""
    return config.micro_batch_size * config.batch.sequence_length


def compute_hidden_bytes(config: Config) -> int:
    """Return the bytes of the hidden states of a micro batch, unsharded."""
    itemsize = get_itemsize(config.precision.compute_dtype)
    return count_micro_batch_tokens(config) * config.model.hidden_size * itemsize


def _count_local_elements(
    parameters: Iterable[ModuleParameter], mesh: ParallelDegrees
) -> list[int]:
    """Return the number of elements of a rank's shard of each parameter."""
    return [
        sum(spec.compute_local_numel(mesh.tp) for spec in parameter.specs)
        for parameter in parameters
    ]


def _count_elements_by_role(
    parameters: Iterable[ModuleParameter], mesh: ParallelDegrees
) -> Counter[ParameterRole]:
    """Return the number of elements of a rank's shards by role."""
    counts = Counter[ParameterRole]()
    for spec in (spec for parameter in parameters for spec in parameter.specs):
        counts[spec.role] += spec.compute_local_numel(mesh.tp)
    return counts
