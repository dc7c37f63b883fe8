"""Layers of pipeline stages."""

import pytest

from hlat.distributed.pipeline_stages import assign_layers_to_stages


def test_stages() -> None:
    assert assign_layers_to_stages(80, 8) == tuple(range(10 * s, 10 * s + 10) for s in range(8))
    assert assign_layers_to_stages(5, 1) == (range(5),)
    assert assign_layers_to_stages(10, 4) == (range(2), range(2, 5), range(5, 8), range(8, 10))


@pytest.mark.parametrize("num_layers", [3, 7, 32])
def test_stages_cover_the_layers_in_order(num_layers: int) -> None:
    for pp in range(1, num_layers + 1):
        stages = assign_layers_to_stages(num_layers, pp)
        assert [layer for stage in stages for layer in stage] == list(range(num_layers))
        sizes = [len(stage) for stage in stages]
        assert max(sizes) - min(sizes) <= 1
        assert sizes[-1] == min(sizes)
