"""Search for parallel layouts.

A layout is the parallel degrees, the pipeline schedule, the micro batch size, activation
checkpointing, the ZeRO stage and the number of replicas that it shards.
Validation rules decide which layouts are valid, memory which fit, and time which is best.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from hlat.config.config_errors import ConfigError
from hlat.config.engine_capabilities import ENGINE_CAPABILITIES, Limit
from hlat.config.parallelism import ActivationCheckpointing, PipelineSchedule
from hlat.config.parallelism_validation import PARALLELISM_VALIDATORS
from hlat.config.run import Config
from hlat.distributed.mesh_coordinates import ParallelDegrees
from hlat.model.mlp_spec import get_mlp_spec
from hlat.plan.achieved_speed import compute_achieved_speed, get_efficiency
from hlat.plan.hardware_efficiency import get_planned_engine
from hlat.plan.layout_costs import LayoutCosts
from hlat.plan.memory_estimate import MemoryEstimate, get_device_memory_bytes

_CHECKPOINTING_MODES = list(ActivationCheckpointing)
_MAX_MICRO_BATCH_SIZE = 16
_NODES_OF_REPLICA = (1, 8, 64)
MAX_NODES = 1024


@dataclass(frozen=True)
class LayoutCandidate:
    """Valid layout with its predicted memory and step time; None if that is unknown."""

    config: Config
    memory: MemoryEstimate
    fits: bool
    step_s: float | None

    @property
    def overrides(self) -> list[str]:
        """Overrides that select the layout."""
        layout = self.config.parallelism
        dp = [] if layout.dp is None else [f"parallelism.dp={layout.dp}"]
        schedule = [
            f"parallelism.pipeline_schedule={layout.pipeline_schedule.value}",
            f"parallelism.stages_per_rank={layout.stages_per_rank}",
        ]
        ep = [f"parallelism.ep={layout.ep}"] if _count_experts(self.config) else []
        return [
            f"parallelism.tp={layout.tp}",
            f"parallelism.pp={layout.pp}",
            *dp,
            *ep,
            *schedule,
            f"parallelism.zero={layout.zero}",
            f"parallelism.dp_replicate={layout.dp_replicate}",
            f"parallelism.activation_checkpointing={layout.activation_checkpointing.value}",
            f"parallelism.sequence_parallel={str(layout.sequence_parallel).lower()}",
            f"batch.micro_batch_size={self.config.micro_batch_size}",
        ]


def find_layout_problems(config: Config) -> list[str]:
    """Return the violated rules that concern the layout."""
    engine = get_planned_engine(config)
    problems = [problem for validate in PARALLELISM_VALIDATORS for problem in validate(config)]
    for limit in _get_limits(config):
        if not limit.is_met(config):
            problems.append(limit.format_violation(config, engine))
    return problems


def _get_limits(config: Config) -> tuple[Limit, ...]:
    return ENGINE_CAPABILITIES[get_planned_engine(config)].layout_limits


def search_layouts(config: Config) -> list[LayoutCandidate]:
    """Return all valid layouts on the run's nodes: first those that fit, then by step time.

    If step times are unknown, sort by memory.
    """
    try:
        speed = compute_achieved_speed(config, get_efficiency(config))
    except ConfigError:
        speed = None
    candidates, costs, is_refused = [], LayoutCosts(speed), _build_filter()
    for layout in generate_layouts(config):
        if not is_refused(layout):
            memory, step = costs.estimate_memory(layout), costs.compute_step_time(layout)
            fits = memory.total <= get_device_memory_bytes(layout)
            step_s = None if step is None else step.total
            candidates.append(LayoutCandidate(layout, memory, fits, step_s))
    return sorted(candidates, key=lambda one: (not one.fits, one.step_s or one.memory.total))


def _build_filter() -> Callable[[Config], bool]:
    """Return a function that returns True if `find_layout_problems` finds one.

    Limits of engines concern settings other than the micro batch size, so that their result is the
    same for layouts with equal `parallelism` of one run.
    """
    results: dict[tuple[Any, ...], bool] = {}

    def is_refused(config: Config) -> bool:
        if any(True for validate in PARALLELISM_VALIDATORS for _ in validate(config)):
            return True
        layout = tuple(vars(config.parallelism).values())
        if layout not in results:
            results[layout] = any(not limit.is_met(config) for limit in _get_limits(config))
        return results[layout]

    return is_refused


def generate_layouts(config: Config) -> Iterator[Config]:
    """Yield the configuration in every layout of its processes, valid or not."""
    derives_dp = config.parallelism.dp is None and config.hardware.processes_per_node is not None
    for mesh in _iter_degrees(config):
        max_size = min(config.batch.global_batch_size // mesh.dp, _MAX_MICRO_BATCH_SIZE)
        sizes = [1 << n for n in range(max_size.bit_length())]
        replicas = _list_replicas(config, mesh)
        sharded = [(0, 1), (1, 1), (2, 1), *((3, count) for count in replicas)]
        for size, mode, (zero, num_replicas) in product(sizes, _CHECKPOINTING_MODES, sharded):
            if zero and mesh.dp == 1 and zero != config.parallelism.zero:
                continue  # ZeRO stages are equivalent for one replica
            batch = replace(config.batch, micro_batch_size=size)
            num_micro_batches = config.batch.global_batch_size // (size * mesh.dp)
            for schedule, stages_per_rank in _list_schedules(config, mesh.pp, num_micro_batches):
                layout = replace(
                    config.parallelism,
                    tp=mesh.tp,
                    pp=mesh.pp,
                    dp=None if derives_dp else mesh.dp,
                    ep=mesh.ep,
                    zero=zero,
                    dp_replicate=num_replicas,
                    sequence_parallel=mesh.tp > 1 and config.batch.sequence_length % mesh.tp == 0,
                    activation_checkpointing=mode,
                    pipeline_schedule=schedule,
                    stages_per_rank=stages_per_rank,
                )
                yield replace(config, parallelism=layout, batch=batch)


def _iter_degrees(config: Config) -> Iterator[ParallelDegrees]:
    """Yield the degrees whose product is the number of processes."""
    num_processes, num_heads = config.num_processes, config.model.num_attention_heads
    for tp, pp in product(range(1, num_heads + 1), range(1, config.model.num_layers + 1)):
        if num_heads % tp or num_processes % (tp * pp):
            continue
        dp = num_processes // (tp * pp)
        for ep in range(1, max(1, min(dp, _count_experts(config))) + 1):
            if dp % ep == 0:
                yield ParallelDegrees(dp, tp, pp, ep)


def _list_replicas(config: Config, mesh: ParallelDegrees) -> list[int]:
    """Return 1 and the numbers of replicas that each have all processes of 1, 8 or 64 nodes."""
    per_node, counts = config.hardware.processes_per_node or 0, [1]
    for num_nodes in _NODES_OF_REPLICA:
        dp_shard, remainder = divmod(per_node * num_nodes, mesh.tp)
        if not remainder and 1 < dp_shard < mesh.dp and mesh.dp % dp_shard == 0:
            counts.append(mesh.dp // dp_shard)
    return counts


def _list_schedules(
    config: Config, pp: int, num_micro_batches: int
) -> list[tuple[PipelineSchedule, int]]:
    """Return the pipeline schedules with stages per rank, which have the same number of layers."""
    schedules = [(PipelineSchedule.one_f_one_b, 1)]
    per_rank, remainder = divmod(config.model.num_layers, pp)
    if pp > 1 and not remainder and num_micro_batches % pp == 0:
        counts = [count for count in range(2, per_rank + 1) if per_rank % count == 0]
        several = (PipelineSchedule.interleaved, PipelineSchedule.zero_bubble)
        schedules += product(several, counts)
    return schedules


def _count_experts(config: Config) -> int:
    return get_mlp_spec(config.model).count_experts(config.model)


def count_equal_layouts(layouts: Sequence[LayoutCandidate]) -> int:
    """Return the number of layouts that are as fast as the first one, within intervals.

    The intervals exclude errors that all layouts have in common. `layouts` are in the order of
    `search_layouts`, with step times.
    """
    fitting = [layout.step_s for layout in layouts if layout.fits and layout.step_s is not None]
    if not fitting:
        return 0
    low, high = get_efficiency(layouts[0].config).layout_interval
    return sum(step_s * low <= fitting[0] * high for step_s in fitting)


def find_nearest_layouts(
    config: Config, layouts: Iterable[LayoutCandidate], count: int
) -> list[LayoutCandidate]:
    """Return the layouts closest to the configuration; ties by step time or memory."""

    def key(layout: LayoutCandidate) -> tuple[float, float]:
        return _compute_distance(config, layout.config), layout.step_s or layout.memory.total

    return sorted(layouts, key=key)[:count]


def search_more_nodes(config: Config) -> list[LayoutCandidate]:
    """Double the nodes until a layout fits; return all layouts that fit then."""
    nodes = config.hardware.nodes
    while config.hardware.processes_per_node is not None and nodes < MAX_NODES:
        nodes *= 2
        larger = replace(
            config,
            hardware=replace(config.hardware, nodes=nodes),
            parallelism=replace(config.parallelism, dp=None),
        )
        if fitting := [layout for layout in search_layouts(larger) if layout.fits]:
            return fitting
    return []


def _compute_distance(config: Config, other: Config) -> float:
    """Return the distance of two layouts: factors of two, and steps of the other choices.

    Tensor parallelism has a higher weight, since it changes the shape of every matrix.
    """
    one, two = config.parallelism, other.parallelism
    modes = [_CHECKPOINTING_MODES.index(p.activation_checkpointing) for p in (one, two)]
    return (
        1.1 * abs(math.log2(one.tp / two.tp))
        + abs(math.log2(one.pp / two.pp))
        + abs(math.log2(one.ep / two.ep))
        + abs(math.log2(one.stages_per_rank / two.stages_per_rank))
        + (one.pipeline_schedule is not two.pipeline_schedule)
        + abs(math.log2(config.micro_batch_size / other.micro_batch_size))
        + abs(one.zero - two.zero)
        + abs(math.log2(one.dp_replicate / two.dp_replicate))
        + abs(modes[0] - modes[1])
    )
