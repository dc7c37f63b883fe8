"""Processes along the axes data, tensor and pipeline: how many, and which process stands where.

The arithmetic is apart from any process group, so a planner and a launcher can ask it before a
process exists, and every engine places its ranks alike.
"""

from dataclasses import dataclass

from hlat.config.errors import ConfigError
from hlat.config.parallelism import Parallelism


@dataclass(frozen=True)
class Degrees:
    """Processes along each axis."""

    dp: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def num_processes(self) -> int:
        """Processes of the whole mesh."""
        return self.dp * self.tp * self.pp


@dataclass(frozen=True)
class Coordinates:
    """Place of one process along each axis."""

    dp: int = 0
    tp: int = 0
    pp: int = 0


def degrees(parallelism: Parallelism, num_processes: int) -> Degrees:
    """The degrees of a run, with dp derived where it is null.

    Args:
        parallelism: The configured degrees.
        num_processes: Processes of the run.

    Raises:
        ConfigError: The product of the degrees is not the number of processes.
    """
    tp, pp = parallelism.tp, parallelism.pp
    dp, rest = divmod(num_processes, tp * pp)
    if rest or dp == 0:
        raise ConfigError(
            f"parallelism.tp={tp} x parallelism.pp={pp} = {tp * pp} does not divide the run's "
            f"{num_processes} processes (hardware.nodes x hardware.processes_per_node); "
            f"{_fitting(tp, pp, num_processes)}"
        )
    if parallelism.dp not in (None, dp):
        raise ConfigError(
            f"parallelism.dp={parallelism.dp} x tp={tp} x pp={pp} = {parallelism.dp * tp * pp} "
            f"processes, but the run has {num_processes}; set parallelism.dp={dp} or null"
        )
    return Degrees(dp, tp, pp)


def coordinates(rank: int, degrees: Degrees) -> Coordinates:
    """Where a rank stands: tp varies fastest, then dp, then pp.

    The order [pp, dp, tp] is neuronx-distributed's (parallel_state.initialize_model_parallel):
    tensor-parallel peers, which talk most, are neighbours on one node, and pipeline stages, which
    talk least, are farthest apart.
    """
    rest, tp = divmod(rank, degrees.tp)
    pp, dp = divmod(rest, degrees.dp)
    return Coordinates(dp, tp, pp)


def rank(place: Coordinates, degrees: Degrees) -> int:
    """The rank that stands there; the inverse of `coordinates`."""
    return (place.pp * degrees.dp + place.dp) * degrees.tp + place.tp


def _fitting(tp: int, pp: int, num_processes: int) -> str:
    """What would work instead."""
    if num_processes % pp == 0:
        share = num_processes // pp
        fitting = ", ".join(str(n) for n in range(1, share + 1) if share % n == 0)
        return f"with pp={pp}, use parallelism.tp={fitting}"
    return f"use a number of processes that is a multiple of {tp * pp}, or smaller degrees"
