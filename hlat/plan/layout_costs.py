"""Memory and step time of many layouts of one run, whose common parts are computed once."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from hlat.config.run import Config
from hlat.distributed.mesh_coordinates import ParallelDegrees, compute_parallel_degrees
from hlat.model.decoder_spec import group_layers
from hlat.plan import memory_estimate, pipeline_stage_shards, step_time
from hlat.plan.achieved_speed import AchievedSpeed
from hlat.plan.framework_traits import HLAT
from hlat.plan.memory_estimate import MemoryEstimate
from hlat.plan.pipeline_stage_shards import PipelineStageShard
from hlat.plan.step_time import StepTime

_Result = TypeVar("_Result")


class LayoutCosts:
    """Memory and step time of layouts that differ in parallelism and micro batch size only.

    The results are those of `estimate_memory` and `compute_step_time`.
    """

    def __init__(self, speed: AchievedSpeed | None) -> None:
        self._speed = speed
        self._results: dict[Hashable, Any] = {}

    def estimate_memory(self, config: Config) -> MemoryEstimate:
        """Return the memory of the fullest device."""
        mesh, layout = _get_mesh(config), config.parallelism
        key, stages = self._build_stages(config, mesh)
        states = self._reuse(
            ("state", key, mesh, layout.zero, layout.pipeline_schedule),
            lambda: memory_estimate.estimate_states(config, mesh, stages),
        )
        micro_batch = (config.micro_batch_size, layout.activation_checkpointing)
        activations = self._reuse(
            ("activations", mesh.tp, layout.sequence_parallel, micro_batch),
            lambda: memory_estimate.compute_activation_bytes(config, mesh),
        )
        return memory_estimate.estimate_peak(config, mesh, states, activations)

    def compute_step_time(self, config: Config) -> StepTime | None:
        """Return the time of a step; None if the speed is unknown."""
        if (speed := self._speed) is None:
            return None
        mesh, layout = _get_mesh(config), config.parallelism
        key, stages = self._build_stages(config, mesh)
        micro_batch = (config.micro_batch_size, layout.activation_checkpointing)
        times = self._reuse(
            ("times", key, layout.sequence_parallel, micro_batch),
            lambda: step_time.compute_stage_times(config, mesh, stages, speed, HLAT),
        )
        largest = self._reuse(("largest", key), lambda: step_time.find_largest_stage(stages))
        update_s = self._reuse(
            ("update", key, mesh, layout.zero),
            lambda: step_time.compute_optimizer_time(config, mesh, largest, speed),
        )
        return step_time.add_times(config, mesh, times, largest, update_s, speed, HLAT)

    def _build_stages(
        self, config: Config, mesh: ParallelDegrees
    ) -> tuple[Hashable, list[PipelineStageShard]]:
        """Return the shard of each rank along the pipeline, and a key that determines them."""
        model = config.model
        layers = self._reuse(
            ("layers", mesh.tp, mesh.ep),
            lambda: pipeline_stage_shards.build_layer_shards(model, mesh),
        )
        # A rank has the same number of equal layers in one stage or several
        has_equal_layers = self._reuse("equal layers", lambda: len({*group_layers(model)}) == 1)
        stages_per_rank = 1 if has_equal_layers else config.parallelism.stages_per_rank
        key = ("stages", mesh.tp, mesh.ep, mesh.pp, stages_per_rank)
        return key, self._reuse(
            key,
            lambda: pipeline_stage_shards.split_into_stages(model, mesh, layers, stages_per_rank),
        )

    def _reuse(self, key: Hashable, compute: Callable[[], _Result]) -> _Result:
        if key not in self._results:
            self._results[key] = compute()
        result: _Result = self._results[key]
        return result


def _get_mesh(config: Config) -> ParallelDegrees:
    return compute_parallel_degrees(config.parallelism, config.num_processes)
