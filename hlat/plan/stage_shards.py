"""Parameter counts of one rank of each pipeline stage."""

from dataclasses import dataclass, replace

from hlat.config.model import ModelConfig
from hlat.config.run import Config
from hlat.model.parameter_specs import list_parameter_specs
from hlat.parallelism.mesh_coordinates import ParallelDegrees
from hlat.parallelism.sharding import assign_layers_to_stages, compute_local_numel
from hlat.precision.precision_bytes import get_itemsize


@dataclass(frozen=True)
class StageShard:
    """One tensor-parallel rank's shard of a pipeline stage.

    `norm_numel` counts the weights of the norms of one layer, which are in no matmul,
    `non_layer_numel` those outside of layers, `largest_numel` those of the largest matrix.
    """

    num_layers: int
    layer_numel: int
    norm_numel: int
    num_kv_heads: int
    non_layer_numel: int
    largest_numel: int
    is_first: bool
    is_last: bool

    @property
    def numel(self) -> int:
        """Total number of weights."""
        return self.num_layers * self.layer_numel + self.non_layer_numel


def build_stage_shards(model: ModelConfig, mesh: ParallelDegrees) -> list[StageShard]:
    """Return the shard of each rank along the pipeline."""
    one_layer = replace(model, num_layers=1)  # layers are identical
    numels = {
        spec: compute_local_numel(spec.name, spec.shape, model, mesh.tp)
        for spec in list_parameter_specs(one_layer)
    }
    layer = {spec: numel for spec, numel in numels.items() if spec.layer is not None}
    embedding, *head = (numel for spec, numel in numels.items() if spec.layer is None)
    non_layer = [0] * mesh.pp
    non_layer[0] += embedding
    non_layer[-1] += sum(head)
    return [
        StageShard(
            num_layers=len(layers),
            layer_numel=sum(layer.values()),
            norm_numel=sum(numel for spec, numel in layer.items() if len(spec.shape) == 1),
            num_kv_heads=-(-model.num_key_value_heads // mesh.tp),
            non_layer_numel=non_layer[rank],
            largest_numel=max(*layer.values(), non_layer[rank]),
            is_first=rank == 0,
            is_last=rank == mesh.pp - 1,
        )
        for rank, layers in enumerate(assign_layers_to_stages(model.num_layers, mesh.pp))
    ]


def count_micro_batch_tokens(config: Config) -> int:
    """Return the tokens of a micro batch."""
    return config.micro_batch_size * config.batch.sequence_length


def compute_hidden_bytes(config: Config) -> int:
    """Return the bytes of the hidden states of a micro batch, unsharded."""
    itemsize = get_itemsize(config.precision.compute)
    return count_micro_batch_tokens(config) * config.model.hidden_size * itemsize
