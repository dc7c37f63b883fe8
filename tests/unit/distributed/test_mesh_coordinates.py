"""Degrees and coordinates of ranks."""

from dataclasses import replace
from itertools import chain

import pytest

from hlat.config.parallelism import ParallelismConfig
from hlat.distributed.mesh_coordinates import (
    ParallelDegrees,
    compute_mesh_coordinates,
    compute_parallel_degrees,
    partition_ranks,
    split_into_groups,
)


def test_dp_follows_from_tp_and_pp() -> None:
    assert compute_parallel_degrees(ParallelismConfig(), 1) == ParallelDegrees(1, 1, 1)
    assert compute_parallel_degrees(ParallelismConfig(tp=8), 64 * 32) == ParallelDegrees(
        dp=256, tp=8
    )
    assert compute_parallel_degrees(ParallelismConfig(tp=32, pp=8), 256 * 32) == ParallelDegrees(
        dp=32, tp=32, pp=8
    )
    assert compute_parallel_degrees(ParallelismConfig(tp=2, dp=3), 6) == ParallelDegrees(dp=3, tp=2)


def test_order_is_pp_dp_tp() -> None:
    mesh = ParallelDegrees(dp=2, tp=2, pp=2)
    coordinates = [compute_mesh_coordinates(rank, mesh) for rank in range(mesh.world_size)]
    assert [(p.pp, p.dp, p.tp) for p in coordinates] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (0, 1, 1),
        (1, 0, 0),
        (1, 0, 1),
        (1, 1, 0),
        (1, 1, 1),
    ]


def test_groups_have_consecutive_data_parallel_ranks() -> None:
    mesh = ParallelDegrees(dp=4, tp=2, pp=2)
    groups, across = split_into_groups(partition_ranks(mesh, "dp"), 2)
    assert groups[:4] == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert across[:4] == [[0, 4], [2, 6], [1, 5], [3, 7]]
    for ranks in (groups, across):
        assert sorted(chain.from_iterable(ranks)) == list(range(16))


@pytest.mark.parametrize("axis", ["dp", "tp", "pp"])
def test_ranks_of_a_group_differ_only_along_the_axis(axis: str) -> None:
    mesh = ParallelDegrees(dp=3, tp=4, pp=5)
    groups = partition_ranks(mesh, axis)
    assert sorted(chain.from_iterable(groups)) == list(range(60))
    for ranks in groups:
        coordinates = [compute_mesh_coordinates(rank, mesh) for rank in ranks]
        assert [getattr(each, axis) for each in coordinates] == [*range(getattr(mesh, axis))]
        assert len({replace(each, **{axis: 0}) for each in coordinates}) == 1
