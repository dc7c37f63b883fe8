"""Parameter counts of one rank of each pipeline stage, and settings of its execution."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

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
class LocalMatrix:
    """Equal matrices of a layer on one rank, each of which is a matmul of the forward pass.

    Attributes:
        num_inputs: Columns.
        num_outputs: Rows.
        num_sources: Number of ranks with tokens that it is applied to.
        token_fraction: Fraction of their tokens that it is applied to.
    """

    num_inputs: int
    num_outputs: int
    num_sources: int = 1
    token_fraction: float = 1.0


@dataclass(frozen=True)
class PipelineStageShard:
    """One tensor-parallel rank's shard of a pipeline stage.

    Attributes:
        layers: First layer of each kind in the model, and the number of layers of this kind.
        layer_numels: Weights of each layer.
        num_regions: Tensor-parallel regions of all layers.
        matrix_share: Fraction of the model's matrices inside of layers, by their weights.
        non_layer_numel: Weights outside of layers.
        numels_by_role: All weights by role of the parameter.
        largest_numel: Weights of the largest parameter.
        is_first: True for the stage with the input.
        is_last: True for the stage with the output.
        expert_numels_by_role: Weights of experts by role, which are included in the others.
        num_expert_layers: Layers with experts.
        matrices: Matrices and their count, by the first layer of each kind.
    """

    layers: tuple[tuple[int, int], ...]
    layer_numels: tuple[int, ...]
    num_regions: int
    matrix_share: float
    non_layer_numel: int
    numels_by_role: tuple[tuple[ParameterRole, int], ...]
    largest_numel: int
    is_first: bool
    is_last: bool
    expert_numels_by_role: tuple[tuple[ParameterRole, int], ...] = ()
    num_expert_layers: int = 0
    matrices: Mapping[int, Mapping[LocalMatrix, int]] = field(default_factory=dict, compare=False)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layer_numels)

    @cached_property
    def numel(self) -> int:
        """Total number of weights."""
        return sum(self.layer_numels) + self.non_layer_numel

    @cached_property
    def largest_pair_numel(self) -> int:
        """Weights of the largest two consecutive layers."""
        following = (*self.layer_numels[1:], 0)
        return max(map(sum, zip(self.layer_numels, following, strict=True)))

    @cached_property
    def expert_numel(self) -> int:
        """Number of weights of experts."""
        return sum(numel for _, numel in self.expert_numels_by_role)

    def compute_shard_numel(self, mesh: ParallelDegrees) -> float:
        """Return the weights of a rank if the ranks of a replica shard them.

        Each expert is on dp_shard / ep of these ranks.
        """
        return (self.numel + (mesh.ep - 1) * self.expert_numel) / mesh.dp_shard

    def iter_updated(
        self, config: Config, mesh: ParallelDegrees
    ) -> Iterator[tuple[ParameterRole, float]]:
        """Yield each role, and the number of its weights that a rank updates."""
        optimizer = get_optimizer_spec(config.optimizer.name)
        experts = dict(self.expert_numels_by_role)
        for role, numel in self.numels_by_role:
            num_ranks = mesh.dp_shard if config.parallelism.zero else 0
            if not optimizer.is_elementwise(role):
                num_ranks = mesh.dp
            all_numel = numel + (mesh.ep - 1) * experts.get(role, 0)
            yield role, all_numel / num_ranks if num_ranks else numel

    def count_averaged(self, config: Config, mesh: ParallelDegrees) -> float:
        """Return the number of weights in the moving average that a rank updates."""
        if config.optimizer.ema_decay is None:
            return 0.0
        return self.compute_shard_numel(mesh) if config.parallelism.zero else self.numel

    def compute_state_bytes(self, config: Config, mesh: ParallelDegrees) -> float:
        """Return the bytes of optimizer state and average of the weights that a rank updates.

        The ranks of a stage share the state of whole matrices equally.
        """
        optimizer, precision = get_optimizer_spec(config.optimizer.name), config.precision
        elementwise = sum(
            numel * compute_state_bytes(precision, optimizer, role)
            for role, numel in self.iter_updated(config, mesh)
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
        return elementwise + matrices * (self.matrix_share / (mesh.dp * mesh.tp))


def build_stage_shards(
    model: ModelConfig, mesh: ParallelDegrees, stages_per_rank: int = 1
) -> list[PipelineStageShard]:
    """Return the shard of each rank along the pipeline."""
    return split_into_stages(model, mesh, build_layer_shards(model, mesh), stages_per_rank)


def build_layer_shards(model: ModelConfig, mesh: ParallelDegrees) -> "list[LayerShard]":
    """Return a rank's shard of each layer, which depends on tp and ep only."""
    kinds = decoder_spec.group_layers(model)
    shards = {kind: LayerShard(model, kind, mesh) for kind in set(kinds)}
    return [shards[kind] for kind in kinds]


def split_into_stages(
    model: ModelConfig,
    mesh: ParallelDegrees,
    layers: "Sequence[LayerShard]",
    stages_per_rank: int = 1,
) -> list[PipelineStageShard]:
    """Return the shard of each rank along the pipeline, given those of the layers.

    Rank r has the stages r, r + pp, r + 2 pp, ...
    """
    non_layer: list[list[ModuleParameter]] = [[] for _ in range(mesh.pp)]
    non_layer[0] += decoder_spec.list_input_parameters(model)
    non_layer[-1] += decoder_spec.list_output_parameters(model)
    if mesh.pp > 1:
        non_layer[-1] += decoder_spec.list_copied_parameters(model)
    num_matrices = sum(layer.num_matrix_elements for layer in layers)
    stages = assign_layers_to_stages(model.num_layers, mesh.pp * stages_per_rank)
    shards = []
    for rank in range(mesh.pp):
        stage_layers = [layers[i] for stage in stages[rank :: mesh.pp] for i in stage]
        counts = Counter(stage_layers)
        others = _count_local_elements(non_layer[rank], mesh)
        roles, experts = _count_elements_by_role(non_layer[rank], mesh), Counter[ParameterRole]()
        for layer, count in counts.items():
            for role, numel in layer.numels_by_role.items():
                roles[role] += count * numel
            for role, numel in layer.expert_numels_by_role.items():
                experts[role] += count * numel
        shards.append(
            PipelineStageShard(
                layers=tuple((layer.kind, count) for layer, count in counts.items()),
                layer_numels=tuple(layer.numel for layer in stage_layers),
                num_regions=sum(layer.num_regions for layer in stage_layers),
                matrix_share=sum(layer.num_matrix_elements for layer in stage_layers)
                / num_matrices,
                non_layer_numel=sum(others),
                numels_by_role=tuple((role, roles[role]) for role in ParameterRole),
                largest_numel=max([*others, *(layer.largest_numel for layer in counts)]),
                is_first=rank == 0,
                is_last=rank == mesh.pp - 1,
                expert_numels_by_role=tuple(experts.items()),
                num_expert_layers=sum(bool(layer.expert_numels_by_role) for layer in stage_layers),
                matrices={layer.kind: layer.matrices for layer in counts},
            )
        )
    return shards


class LayerShard:
    """One tensor-parallel rank's shard of a layer.

    Attributes:
        kind: First layer of the same kind.
        numel: Weights.
        largest_numel: Weights of the largest parameter.
        matrices: Matrices and their count.
        numels_by_role: Weights by role.
        num_regions: Tensor-parallel regions.
        num_matrix_elements: Weights of the unsharded matrices.
        expert_numels_by_role: Weights of experts by role.
    """

    def __init__(self, model: ModelConfig, layer: int, mesh: ParallelDegrees) -> None:
        parameters = decoder_spec.list_layer_parameters(model, layer)
        numels = _count_local_elements(parameters, mesh)
        self.kind, self.numel, self.largest_numel = layer, sum(numels), max(numels)
        self.matrices = _count_local_matrices(parameters, mesh)
        self.numels_by_role = _count_elements_by_role(parameters, mesh)
        experts = [one for one in parameters if one.expert is not None]
        self.expert_numels_by_role = _count_elements_by_role(experts, mesh)
        self.num_regions = len(
            {one.region or one.name for one in parameters if one.sharding is ShardingRule.row}
        )
        specs = [spec for parameter in parameters for spec in parameter.specs]
        self.num_matrix_elements = sum(spec.numel for spec in specs if len(spec.shape) == 2)


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
        for parameter in _iter_local(parameters, mesh)
    ]


def _count_local_matrices(
    parameters: Iterable[ModuleParameter], mesh: ParallelDegrees
) -> Mapping[LocalMatrix, int]:
    """Return the number of matmuls of the forward pass with equal shapes.

    The canonical weights of a module parameter are one matmul, so replicated key/value heads count
    on each rank. Experts are balanced: a local one computes its part of the tokens of all ep ranks.
    """
    counts = Counter[LocalMatrix]()
    for parameter in _iter_local(parameters, mesh):
        shapes = [spec.compute_local_shape(mesh.tp) for spec in parameter.specs]
        if len(shapes[0]) == 2:
            tokens = (mesh.ep, parameter.specs[0].token_fraction) if parameter.expert else (1, 1.0)
            counts[LocalMatrix(shapes[0][1], sum(shape[0] for shape in shapes), *tokens)] += 1
    return counts


def _iter_local(
    parameters: Iterable[ModuleParameter], mesh: ParallelDegrees
) -> Iterator[ModuleParameter]:
    """Yield the parameters of the expert-parallel rank with the most experts, the last one."""
    for parameter in parameters:
        if parameter.expert is None or parameter.expert.is_local(mesh.ep, mesh.ep - 1):
            yield parameter


def _count_elements_by_role(
    parameters: Iterable[ModuleParameter], mesh: ParallelDegrees
) -> Counter[ParameterRole]:
    """Return the number of elements of a rank's shards by role."""
    counts = Counter[ParameterRole]()
    for spec in (spec for parameter in _iter_local(parameters, mesh) for spec in parameter.specs):
        counts[spec.role] += spec.compute_local_numel(mesh.tp)
    return counts
