"""Simulation of one rank of the paper's 70B run on 8,192 processes."""

import pytest

from hlat.config.resolve import resolve_config
from tests.distributed.scale_rehearsal import rehearse

LAYERS, MICRO_BATCHES = 10, 2
RUN = [
    "model=70b",
    "precision=mixed",
    "engine=native",
    "compiler=none",
    "hardware=trn1_32xl",
    "hardware.nodes=256",
    "batch.global_batch_size=64",
]


@pytest.mark.parametrize(
    ("rank", "first", "last"),
    [pytest.param(0, True, False, marks=pytest.mark.slow), (8191, False, True)],
)
@pytest.mark.slow
def test_memory_and_collectives_of_a_rank(compose, rank: int, first: bool, last: bool) -> None:
    found = rehearse(resolve_config(compose(*RUN)), rank)
    assert len(found.parameters) == 6 * LAYERS + first + 2 * last
    layer = 8192 * (256 + 2 * 128) + 8192 * 256 + 3 * 8192 * 896 + 2 * 8192
    ends = first * 1000 * 8192 + last * (1000 * 8192 + 8192)
    assert found.weight_bytes == 2 * (LAYERS * layer + ends)
    calls = {key: count for key, (count, _) in found.collectives.items()}
    # Per micro batch: a layer has two tensor-parallel regions with collectives at both ends, in
    # both passes; the embedding has one end, the head one end and two gathers in each of two chunks
    regions = LAYERS * MICRO_BATCHES
    assert calls["tp all_gather"] == 4 * regions + (first + 5 * last) * MICRO_BATCHES
    assert calls["tp reduce_scatter"] == 4 * regions + (first + last) * MICRO_BATCHES
    # Once per step: replicas of key/value heads are summed, matrices over data-parallel ranks too
    matrices = 4 * LAYERS + first + last
    assert calls["kv all_reduce"] == LAYERS
    assert calls["dp reduce_scatter"] == calls["dp all_gather"] == matrices
