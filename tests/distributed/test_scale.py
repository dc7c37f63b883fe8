"""One rank of the paper's 70B run on 8,192 processes, without them."""

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
def test_what_a_rank_holds_and_says(compose, rank: int, first: bool, last: bool) -> None:
    found = rehearse(resolve_config(compose(*RUN)), rank)
    assert len(found.parameters) == 6 * LAYERS + first + 2 * last
    layer = 8192 * (256 + 2 * 128) + 8192 * 256 + 3 * 8192 * 896 + 2 * 8192
    ends = first * 1000 * 8192 + last * (1000 * 8192 + 8192)
    assert found.weight_bytes == 2 * (LAYERS * layer + ends)
    calls = {key: count for key, (count, _) in found.collectives.items()}
    # A layer enters and leaves two regions, in each direction; the embedding leaves one, the head
    # enters one and joins the vocabulary twice in each of two chunks of logits a micro batch
    regions = LAYERS * MICRO_BATCHES
    assert calls["tp all_gather"] == 4 * regions + (first + 5 * last) * MICRO_BATCHES
    assert calls["tp reduce_scatter"] == 4 * regions + (first + last) * MICRO_BATCHES
    # Copies of key/value heads are added up once a step, matrices over replicas as well
    matrices = 4 * LAYERS + first + last
    assert calls["kv all_reduce"] == LAYERS
    assert calls["dp reduce_scatter"] == calls["dp all_gather"] == matrices
