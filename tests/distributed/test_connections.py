"""A rank connects to the ranks along its axes only, and host flags need few messages."""

from unittest import mock

import psutil
import pytest
import torch.distributed as dist

from hlat.config.run import Config
from hlat.engine.native.native_engine import NativeEngine
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("processes")]


def count_connections() -> int:
    connections = psutil.Process().net_connections("tcp")
    return sum(one.status == psutil.CONN_ESTABLISHED for one in connections)


def connect(config: Config) -> tuple[int, int]:
    """Return the number of connections to other ranks, and those of the axes."""
    before = count_connections()
    engine = NativeEngine()
    engine.build(config)
    mesh = engine._mesh
    assert engine._owns_process_group
    found = count_connections() - before
    axes = (mesh.dp, mesh.tp, mesh.pp)
    engine.close()
    return found, 2 * sum(axis.size - 1 for axis in axes)


def exchange(config: Config) -> list[tuple[bool, int, int]]:
    """Return a flag of each rank as seen here, with the number of messages and collectives."""
    engine = NativeEngine()
    engine.build(config)
    group, results = engine.parallel_state.world_group, []
    for source in [*range(group.size), None]:
        with (
            mock.patch.object(dist, "isend", wraps=dist.isend) as isend,
            mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce,
        ):
            flag = group.any(group.rank == source)
        results.append((flag, isend.call_count, all_reduce.call_count))
    engine.close()
    return results


def test_a_rank_connects_along_its_axes_only(ranks: Ranks, configure) -> None:
    for num_connections, num_axis_connections in ranks.run(4, connect, configure("dp=2 tp=2")):
        assert num_connections == num_axis_connections + 1  # the store


@pytest.mark.parametrize(("layout", "num_messages"), [("dp=2 tp=2", 2), ("dp=4", 2)])
def test_all_ranks_agree_on_a_flag(ranks: Ranks, configure, layout: str, num_messages: int) -> None:
    size = 4
    for results in ranks.run(size, exchange, configure(layout)):
        expected = [(source < size, num_messages, 0) for source in range(size + 1)]
        assert results == expected
