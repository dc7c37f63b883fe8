"""Every layout that a model can take on some nodes, judged by the planner.

A layout is its degrees, the micro batch, what is recomputed and the stage of ZeRO; the rest of the
configuration stays. Rules decide what is valid, memory what fits, and time which is best.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from hlat.config import nxd_rules, parallelism_rules
from hlat.config.engine import Backend
from hlat.config.errors import ConfigError
from hlat.config.parallelism import ActivationCheckpointing
from hlat.config.run import Config
from hlat.planning.efficiency import planned_engine
from hlat.planning.memory import Memory, device_memory, estimate
from hlat.planning.step_time import Speed, efficiency, speed, step_time

_NXD_RULES = (nxd_rules.layout, nxd_rules.recipe)
_RECOMPUTED = list(ActivationCheckpointing)
_LARGEST_MICRO_BATCH = 16
_MOST_NODES = 1024


@dataclass(frozen=True)
class Layout:
    """One layout and what the planner says of it.

    Attributes:
        config: The run in it.
        memory: Of the fullest device.
        fits: Whether the device has that.
        step_s: Seconds of a step; None where no time can be told.
    """

    config: Config
    memory: Memory
    fits: bool
    step_s: float | None

    @property
    def overrides(self) -> list[str]:
        """What to type for it."""
        layout = self.config.parallelism
        dp = [] if layout.dp is None else [f"parallelism.dp={layout.dp}"]
        return [
            f"parallelism.tp={layout.tp}",
            f"parallelism.pp={layout.pp}",
            *dp,
            f"parallelism.zero={layout.zero}",
            f"parallelism.activation_checkpointing={layout.activation_checkpointing.value}",
            f"parallelism.sequence_parallel={str(layout.sequence_parallel).lower()}",
            f"batch.micro_batch_size={self.config.micro_batch_size}",
        ]


def layout_problems(config: Config) -> list[str]:
    """Return what is wrong with the layout alone."""
    found = parallelism_rules.RULES
    if planned_engine(config) is Backend.nxd:
        found += _NXD_RULES
    return [problem for rule in found for problem in rule(config)]


def search(config: Config) -> list[Layout]:
    """Return all valid layouts on the run's nodes: those that fit first, the fastest of them first.

    Where no time can be told, those that need least memory come first.
    """
    try:
        rate = speed(config, efficiency(config))
    except ConfigError:
        rate = None
    found = [judge(one, rate) for one in candidates(config) if not layout_problems(one)]
    return sorted(found, key=_rank)


def judge(config: Config, rate: Speed | None) -> Layout:
    """Return what the planner says of a valid layout."""
    memory = estimate(config)
    seconds = None if rate is None else step_time(config, rate).total
    return Layout(config, memory, memory.total <= device_memory(config), seconds)


def candidates(config: Config) -> Iterator[Config]:
    """Yield the run in every layout that its processes can take, rules aside."""
    processes, layers = config.num_processes, config.model.num_layers
    for tp, pp in product(_divisors(config.model.num_attention_heads), range(1, layers + 1)):
        if processes % (tp * pp):
            continue
        sequences = config.batch.global_batch_size // (processes // (tp * pp))
        for micro, recomputed, zero in product(_powers(sequences), _RECOMPUTED, range(4)):
            if zero and tp * pp == processes and zero != config.parallelism.zero:
                continue  # with one replica the stages of ZeRO are one
            yield _in_layout(config, tp, pp, micro, recomputed, zero)


def nearest(config: Config, found: Iterable[Layout], count: int) -> list[Layout]:
    """Return the layouts that differ least from the run's own, the faster of equals first."""

    def key(one: Layout) -> tuple[float, float]:
        return _distance(config, one.config), one.step_s or one.memory.total

    return sorted(found, key=key)[:count]


def on_more_nodes(config: Config) -> list[Layout]:
    """Return the layouts that fit on the least number of nodes, doubled, on which any does."""
    nodes = config.hardware.nodes
    while config.hardware.processes_per_node is not None and nodes < _MOST_NODES:
        nodes *= 2
        larger = replace(
            config,
            hardware=replace(config.hardware, nodes=nodes),
            parallelism=replace(config.parallelism, dp=None),
        )
        if fitting := [one for one in search(larger) if one.fits]:
            return fitting
    return []


def _in_layout(
    config: Config, tp: int, pp: int, micro: int, recomputed: ActivationCheckpointing, zero: int
) -> Config:
    derived = config.parallelism.dp is None and config.hardware.processes_per_node is not None
    layout = replace(
        config.parallelism,
        tp=tp,
        pp=pp,
        dp=None if derived else config.num_processes // (tp * pp),
        zero=zero,
        sequence_parallel=tp > 1 and config.batch.sequence_length % tp == 0,
        activation_checkpointing=recomputed,
    )
    return replace(config, parallelism=layout, batch=replace(config.batch, micro_batch_size=micro))


def _rank(one: Layout) -> tuple[bool, float]:
    return not one.fits, one.memory.total if one.step_s is None else one.step_s


def _distance(config: Config, other: Config) -> float:
    """How much of a layout changes: factors of two, and steps along the other choices.

    Tensor parallelism counts a little more, as it changes the shape of every matrix.
    """
    one, two = config.parallelism, other.parallelism
    steps = abs(
        _RECOMPUTED.index(one.activation_checkpointing)
        - _RECOMPUTED.index(two.activation_checkpointing)
    )
    micro = math.log2(config.micro_batch_size / other.micro_batch_size)
    return (
        1.1 * abs(math.log2(one.tp / two.tp))
        + abs(math.log2(one.pp / two.pp))
        + abs(micro)
        + abs(one.zero - two.zero)
        + steps
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _powers(limit: int) -> list[int]:
    """Powers of two up to a limit, within what is worth a try."""
    top = min(limit, _LARGEST_MICRO_BATCH)
    return [1 << n for n in range(max(0, top.bit_length()))]
