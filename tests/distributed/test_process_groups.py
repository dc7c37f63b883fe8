"""Creation of process groups from partitions of all ranks."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hlat.distributed import process_groups
from hlat.distributed.device_mesh import init_distributed
from hlat.distributed.process_groups import Partition, create_axes
from hlat.distributed.rank_environment import read_rank_info
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("processes")]


def sum_ranks(partitions: dict[str, Partition]) -> dict[str, float]:
    """Return the sum of ranks along each axis through this rank."""
    rank = _init()
    axes = create_axes(partitions, rank)
    sums = {}
    for name, axis in axes.items():
        tensor = torch.tensor(float(rank))
        axis.all_reduce(tensor)
        sums[name] = tensor.item()
    dist.destroy_process_group()
    return sums


def create_in_other_order(partitions: dict[str, Partition]) -> str:
    """Return the error of a rank if rank 0 creates the axes in the opposite order."""
    rank = _init()
    items = [*partitions.items()]
    with (
        mock.patch.object(process_groups, "_JOIN_TIMEOUT_S", 2.0),
        pytest.raises(RuntimeError) as error,
    ):
        create_axes(dict(items if rank else items[::-1]), rank)
    dist.destroy_process_group()
    return str(error.value)


def _init() -> int:
    info = read_rank_info()
    init_distributed(info.rank, info.world_size, torch.device("cpu"))
    return info.rank


def test_groups_of_unequal_sizes_leave_later_groups_aligned(ranks: Ranks) -> None:
    partitions = {"ends": [[0, 3], [1], [2]], "one": [[0], [1], [2], [3]], "all": [[0, 1, 2, 3]]}
    sums = ranks.run(4, sum_ranks, partitions)
    assert [each["ends"] for each in sums] == [3, 1, 2, 3]
    assert [each["one"] for each in sums] == [0, 1, 2, 3]
    assert [each["all"] for each in sums] == [6] * 4


def test_another_order_ends_with_the_name_and_the_missing_rank(ranks: Ranks) -> None:
    partitions = {"first": [[0, 1]], "second": [[0, 1]]}
    errors = ranks.run(2, create_in_other_order, partitions)
    assert (
        "rank 0 waited 2 s in the creation of process group 'second'; missing ranks: 1."
        in (errors[0])
    )
    assert (
        "rank 1 waited 2 s in the creation of process group 'first'; missing ranks: 0."
        in (errors[1])
    )
