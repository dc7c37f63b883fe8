"""Owners of matrices, and the transfers of one process."""

import pytest
import torch

from hlat.distributed.mesh_axis import MeshAxis
from hlat.engine.native import matrix_exchange
from hlat.engine.native.matrix_exchange import MatrixExchange, MatrixSlice, assign_owners


def test_owners_are_balanced_by_cost() -> None:
    costs = {
        f"layers.{i}.{name}": cost for i in range(8) for name, cost in (("q", 1.0), ("up", 5.0))
    }
    owners = assign_owners(costs, 4)
    loads = [sum(costs[name] for name in costs if owners[name] == rank) for rank in range(4)]
    assert loads == [12.0] * 4
    assert assign_owners(dict(reversed(costs.items())), 4) == owners


def test_a_rank_without_work_is_possible() -> None:
    assert {*assign_owners({"a": 1.0, "b": 1.0}, 3).values()} == {0, 1}


def test_the_owner_is_one_of_the_candidates() -> None:
    owners = assign_owners({"a": 3.0, "b": 2.0, "c": 1.0}, 4, {"a": [2, 3], "b": [3], "c": [3]})
    assert owners == {"a": 2, "b": 3, "c": 3}


@pytest.mark.parametrize("batch_numel", [1, 1 << 24])
def test_slices_are_assembled_and_results_divided(monkeypatch, batch_numel: int) -> None:
    monkeypatch.setattr(matrix_exchange, "_BATCH_NUMEL", batch_numel)
    matrices = {"a": torch.arange(12.0).view(4, 3), "b": torch.arange(6.0).view(2, 3)}
    rows = [("a", 2, 2), ("b", 0, 2), ("a", 0, 2)]
    slices = [MatrixSlice(name, (first, count, 0, 3), True) for name, first, count in rows]
    exchange = MatrixExchange(MeshAxis([0], 0), slices, {"a": 2.0, "b": 1.0}, torch.device("cpu"))
    assert exchange.owned == {"a": (4, 3), "b": (2, 3)}
    tensors = [matrices[name][first : first + count] for name, first, count in rows]
    seen = {}

    def compute(name, matrix):
        seen[name] = matrix.clone()
        return 2 * matrix

    results = dict(exchange.update(tensors, compute, torch.float32))
    assert {name: torch.equal(seen[name], matrices[name]) for name in matrices} == {
        "a": True,
        "b": True,
    }
    for index, tensor in enumerate(tensors):
        assert torch.equal(results[index], 2 * tensor)
