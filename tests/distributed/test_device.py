"""The engine gets its device from torch, so that a device unknown to hlat works as well."""

import json
from collections.abc import Iterator

import pytest

from tests.distributed import shim
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("processes")]


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    """Two separate processes, because a registered device cannot be removed."""
    ranks = Ranks(2)
    yield ranks
    ranks.close()


CASES = [
    ("", "fp32"),
    pytest.param("", "bf16_sr", marks=pytest.mark.slow),
    ("dp=2 zero=1", "mixed"),
    ("tp=2 sequence_parallel=true", "bf16_sr_master"),
    pytest.param("pp=2", "bf16", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("layout", "recipe"), CASES)
def test_unknown_device_trains_like_the_cpu(
    pair: Ranks, configure, layout: str, recipe: str
) -> None:
    found, expected = (
        pair.run(config.num_processes, shim.train, config, 2)
        for device in ("shim", "cpu")
        for config in [configure(layout, f"precision={recipe}", f"engine.device={device}")]
    )
    # Attention is fused on a CPU alone, so sums are taken in another order, in bf16 roughly
    relative = 1e-6 if recipe == "fp32" else 2**-8
    for rank, same in zip(found, expected, strict=True):
        for row, numbers in zip(rank, same, strict=True):
            assert row == pytest.approx(numbers, rel=relative)


@pytest.mark.parametrize(
    ("layout", "recipe"), [("", "bf16_sr"), ("dp=2 zero=1", "mixed"), ("", "bf16_sr_master")]
)
def test_a_step_reads_nothing_from_the_device(
    pair: Ranks, configure, layout: str, recipe: str
) -> None:
    config = configure(layout, f"precision={recipe}", "engine.device=shim")
    for in_steps, in_item in pair.run(config.num_processes, shim.record_reads, config, 2):
        assert in_steps == []
        assert in_item == ["aten._local_scalar_dense.default"]


@pytest.mark.parametrize("recipe", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_unknown_device_passes_preflight(pair: Ranks, configure, tmp_path, recipe: str) -> None:
    config = configure("dp=2", f"precision={recipe}", "engine.device=shim")
    assert pair.run(2, shim.passes, config, str(tmp_path)) == [True, True]
    (event,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert event["failed"] == []
    assert {node["device"] for node in event["nodes"].values()} == {"shim:0"}
