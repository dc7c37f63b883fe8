"""Processes along the axes data, tensor and pipeline: how many, and which process stands where.

The arithmetic is apart from any process group, so a planner and a launcher can ask it before a
process exists, and every engine places its ranks alike.
"""

from dataclasses import dataclass

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
        parallelism: The configured degrees; the rules have seen that they fit the processes.
        num_processes: Processes of the run.
    """
    dp, rest = divmod(num_processes, parallelism.tp * parallelism.pp)
    assert rest == 0
    assert parallelism.dp in (None, dp)
    return Degrees(dp, parallelism.tp, parallelism.pp)


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
