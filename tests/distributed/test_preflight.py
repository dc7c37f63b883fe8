"""If one of several ranks is faulty, preflight fails on all of them and rank 0 names it."""

import json
from pathlib import Path

import pytest

from tests.distributed import faults

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("processes")]


def events(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_healthy_ranks_build_the_engine(ranks, configure, tmp_path) -> None:
    config = configure("tp=2 dp=2")
    assert ranks.run(4, faults.check, config, str(tmp_path), "sends", 9) == [True] * 4
    (event,) = events(tmp_path)
    assert event["event"] == "preflight"
    assert event["failed"] == []
    assert sorted(event["nodes"]) == [f"node{rank}" for rank in range(4)]
    for node in event["nodes"].values():
        assert node["flops_per_s"] > 1e6
        assert sorted(node["bytes_per_s"]) == ["dp", "tp"]
        assert min(node["bytes_per_s"].values()) > 1e4


@pytest.mark.parametrize(
    ("layout", "fault", "broken", "reason"),
    [
        pytest.param(
            *("dp=2", "sends", 1, "all-reduce over dp=2 ranks is wrong"), marks=pytest.mark.slow
        ),
        ("tp=2 dp=2", "sends", 2, "all-reduce over tp=2 ranks is wrong"),
        ("dp=4", "gets", 0, "all-reduce over dp=4 ranks is wrong"),
        ("pp=2", "multiplies", 1, "wrong elements in"),
    ],
)
def test_faulty_rank_is_named(
    ranks, configure, tmp_path, layout: str, fault: str, broken: int, reason: str
) -> None:
    config = configure(layout)
    size = config.num_processes
    assert ranks.run(size, faults.check, config, str(tmp_path), fault, broken) == [False] * size
    _, event = events(tmp_path)
    assert (event["event"], event["host"], event["ranks"]) == ("exclude", f"node{broken}", [broken])
    assert all(f"rank {broken}: " in sentence for sentence in event["reasons"])
    assert any(reason in sentence for sentence in event["reasons"])


@pytest.mark.slow  # 4 s
@pytest.mark.parametrize("size", [3, 4])
def test_slow_rank_is_found(ranks, configure, tmp_path, size) -> None:
    """Require 0.32 / 20 GB/s; a delay of 0.25 s per all_reduce gives 0.006 GB/s."""
    batch = ("batch.global_batch_size=12", "batch.micro_batch_size=1")
    config = configure(f"dp={size}", *batch, "hardware.link_gb_per_s=0.32")
    assert ranks.run(size, faults.check, config, str(tmp_path), "slow", 2) == [False] * size
    _, event = events(tmp_path)
    assert (event["event"], event["host"], event["ranks"]) == ("exclude", "node2", [2])
    assert f"all-reduce over dp={size} ranks reaches" in event["reasons"][0]


def test_clock_that_is_ahead_is_a_warning(ranks, configure, tmp_path) -> None:
    assert ranks.run(2, faults.check, configure("tp=2"), str(tmp_path), "ahead", 1) == [True] * 2
    (event,) = events(tmp_path)
    (finding,) = event["failed"]
    assert (finding["check"], finding["host"]) == ("clock", "node1")
    assert finding["measured"] == pytest.approx(100, abs=5)


def test_config_error_is_raised_on_all_ranks(ranks, configure, tmp_path) -> None:
    """Simulate a disk that is too small: exit code 2 on each rank."""
    found = ranks.run(2, faults.check, configure("tp=2"), str(tmp_path), "full", 0)
    assert found[0] == found[1]
    assert "two checkpoints take" in found[0][0]
