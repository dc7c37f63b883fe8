"""What one rank holds of each pipeline stage, in weights."""

from dataclasses import dataclass, replace

from hlat.config.model import Model
from hlat.model.canonical import parameters
from hlat.parallelism.mesh import Degrees
from hlat.parallelism.plan import local_numel, stage_layers


@dataclass(frozen=True)
class Stage:
    """One rank's part of the layers that stand next to each other.

    Attributes:
        num_layers: Decoder layers.
        layer: Weights of one of them on one rank.
        vectors: Those of them that are norms, which multiply nothing.
        kv_heads: Key/value heads of a layer on one rank.
        ends: Weights outside of layers.
        largest: Weights of the largest matrix.
        is_first: Whether it embeds the tokens.
        is_last: Whether it has the head.
    """

    num_layers: int
    layer: int
    vectors: int
    kv_heads: int
    ends: int
    largest: int
    is_first: bool
    is_last: bool

    @property
    def numel(self) -> int:
        """Weights of all of it."""
        return self.num_layers * self.layer + self.ends


def stages(model: Model, mesh: Degrees) -> list[Stage]:
    """Return the stages of each rank along the pipeline."""
    single = replace(model, num_layers=1)  # all layers are alike
    numels = {
        parameter: local_numel(parameter.name, parameter.shape, model, mesh.tp)
        for parameter in parameters(single)
    }
    inside = {one: numel for one, numel in numels.items() if one.layer is not None}
    first, *rest = (numel for one, numel in numels.items() if one.layer is None)
    ends = [0] * mesh.pp
    ends[0] += first
    ends[-1] += sum(rest)
    return [
        Stage(
            num_layers=len(layers),
            layer=sum(inside.values()),
            vectors=sum(numel for one, numel in inside.items() if len(one.shape) == 1),
            kv_heads=-(-model.num_key_value_heads // mesh.tp),
            ends=ends[rank],
            largest=max(*inside.values(), ends[rank]),
            is_first=rank == 0,
            is_last=rank == mesh.pp - 1,
        )
        for rank, layers in enumerate(stage_layers(model.num_layers, mesh.pp))
    ]
