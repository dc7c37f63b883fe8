"""Faulty nodes found from the measurements of all ranks, and the consequence of each check."""

import dataclasses
import re
from pathlib import Path

import pytest

from hlat.config.resolve import resolve_config
from hlat.engine.interface import DeviceReport, LinkReport
from hlat.recovery import preflight_checks
from hlat.recovery.preflight_checks import (
    CONSEQUENCES,
    Consequence,
    RankReport,
    check_reports,
    find_faulty_ranks,
)

HEALTHY = DeviceReport("cpu", None, None, 9, 0, 1e10, [])
DOCUMENT = Path(__file__).parents[3] / "docs/preflight.md"


def report(rank: int, host: str = "a", files: int = 10**6, **changed) -> RankReport:
    device_report = dataclasses.replace(HEALTHY, **changed)
    return RankReport(host, rank, files, [100 + rank, 1], [], None, device_report)


def dp(
    num_wrong: int, wrong: list[list[int]], speed=1e9, expected=None, slow=(), size=2
) -> LinkReport:
    return LinkReport("dp", [*range(size)], num_wrong, wrong, speed, expected, [*slow])


def failed(config, reports: list[RankReport]) -> list[tuple[str, int, str, str]]:
    return [
        (one.host, one.rank, one.check, one.consequence.value)
        for one in check_reports(config, reports)
    ]


@pytest.fixture
def config(compose):
    return resolve_config(compose())


@pytest.fixture
def trn1(compose):
    return resolve_config(
        compose("hardware=trn1_32xl", "batch.global_batch_size=32", "precision=bf16")
    )


@pytest.mark.parametrize(
    ("pairs", "faulty"),
    [
        ([], []),
        ([(0, 1), (1, 1)], [1]),  # it detects its errors too
        ([(0, 2), (1, 2), (3, 2)], [2]),  # a sender
        ([(2, 0), (2, 1), (2, 3)], [2]),  # a receiver
        ([(0, 1), (1, 2)], [1]),  # of a ring of three or more
        ([(0, 1)], [0, 1]),  # ambiguous
        ([(0, 1), (1, 0)], [0, 1]),
        ([(0, 1), (1, 2), (4, 5), (5, 6)], [1, 5]),
    ],
)
def test_the_fewest_ranks_that_explain_all_errors_are_faulty(pairs, faulty) -> None:
    assert find_faulty_ranks(pairs) == faulty


def test_healthy_nodes_pass(config) -> None:
    links = [dp(0, [])]
    assert failed(config, [report(0, links=links), report(1, "b", links=links)]) == []


def test_wrong_arithmetic_names_its_node(config) -> None:
    reports = [report(0), report(1, "b", num_wrong=1)]
    assert failed(config, reports) == [("b", 1, "arithmetic", "exclude")]


def test_a_wrong_sum_is_attributed_to_the_reported_rank(config) -> None:
    reports = [report(0, links=[dp(4, [[0, 1]])]), report(1, "b", links=[dp(4, [[1, 1]])])]
    assert failed(config, reports) == [("b", 1, "sum", "exclude")]


def test_an_unattributed_wrong_sum_is_attributed_to_its_receiver(config) -> None:
    reports = [report(0, links=[dp(4, [])]), report(1, "b", links=[dp(0, [])])]
    assert failed(config, reports) == [("a", 0, "sum", "exclude")]


def test_speed_is_compared_only_with_the_peak_of_the_device(trn1, config) -> None:
    slow = 0.049 * 95e12
    assert failed(trn1, [report(0), report(1, "b", flops_per_s=5e12)])[0][:3] == ("a", 0, "speed")
    assert failed(trn1, [report(0, flops_per_s=slow)]) == [("a", 0, "speed", "exclude")]
    assert failed(config, [report(0, flops_per_s=1.0)]) == []


@pytest.mark.parametrize(
    ("recipe", "right", "wrong"), [("bf16", 0.0, 0.125), ("bf16_sr", 0.122, 0.0)]
)
def test_the_rounding_of_the_hardware_must_be_the_configured_one(
    compose, recipe, right, wrong
) -> None:
    config = resolve_config(compose(f"precision={recipe}"))
    assert failed(config, [report(0, rounded_up_share=right)]) == []
    assert failed(config, [report(0, rounded_up_share=wrong)]) == [("a", 0, "rounding", "refuse")]


def test_a_check_that_every_node_fails_excludes_no_node(trn1) -> None:
    both = [report(0), report(1, "b")]
    assert failed(trn1, both) == [("a", 0, "speed", "warn"), ("b", 1, "speed", "warn")]


def test_memory_in_use_by_another_process(config) -> None:
    held = {"free_bytes": 1000, "total_bytes": 2**34}
    assert failed(config, [report(0), report(1, "b", **held)]) == [("b", 1, "memory", "exclude")]
    assert failed(config, [report(0, free_bytes=2**34, total_bytes=2**34)]) == []


def test_the_node_of_slow_links_is_excluded(config) -> None:
    pairs = {0: [[0, 1]], 1: [[0, 1], [1, 2]], 2: [[1, 2]]}
    reports = [
        report(rank, host, links=[dp(0, [], 1.0, 1e9, pairs[rank], 3)])
        for rank, host in enumerate("abc")
    ]
    assert failed(config, reports) == [("b", 1, "link", "exclude")]


def test_a_slow_axis_without_a_slow_pair_is_a_warning(config) -> None:
    links = [dp(0, [], 1.0, 1e9)]
    reports = [report(0, links=links), report(1, links=links)]
    assert failed(config, reports) == [("a", 0, "link", "warn"), ("a", 1, "link", "warn")]


def test_nccom_bandwidth_and_errors(trn1) -> None:
    fast = dataclasses.replace(HEALTHY, flops_per_s=5e13)
    one = dataclasses.replace(report(0), device_report=fast)
    for speed, found in ((0.04 * 384e9, [("a", 0, "link", "exclude")]), (40 * 2**30, [])):
        assert failed(trn1, [dataclasses.replace(one, nccom=speed)]) == found
    broken = dataclasses.replace(one, nccom="1 errors found")
    assert failed(trn1, [broken]) == [("a", 0, "nccom", "warn")]


def test_the_limit_of_open_files_follows_from_the_processes(config) -> None:
    assert failed(config, [report(0, files=263)]) == [("a", 0, "open_files", "refuse")]
    assert failed(config, [report(0, files=264)]) == []


def test_processes_of_this_run_are_not_remaining_processes(config) -> None:
    first, second = report(0), report(1)
    same_run = dataclasses.replace(first, same_command_pids=[101])
    assert failed(config, [same_run, second]) == []
    other_run = dataclasses.replace(first, same_command_pids=[101, 77])
    (found,) = check_reports(config, [other_run, second])
    assert found.consequence is Consequence.warn
    assert "77 on a were left" in found.sentence
    # the same pid on another node is another process
    assert failed(config, [dataclasses.replace(first, same_command_pids=[101]), report(1, "b")])


@pytest.mark.parametrize(
    ("free", "has_one", "ok"), [(199, False, False), (200, False, True), (100, True, True)]
)
def test_a_disk_must_have_space_for_two_checkpoints(free, has_one, ok) -> None:
    found = preflight_checks.check_disk_space("a", "runs/x", free, 100, has_one)
    assert [one.consequence for one in found] == ([] if ok else [Consequence.refuse])


@pytest.mark.parametrize(
    ("bounds", "skew"), [((-0.1, 0.2), 0.0), ((3.0, 3.1), 3.0), ((-9.0, -4.0), -4.0)]
)
def test_a_skew_below_its_uncertainty_is_ignored(bounds, skew) -> None:
    found = preflight_checks.check_clock(report(1, "b"), bounds, 1.0)
    assert [one.measured for one in found] == ([skew] if skew else [])


def test_json_round_trip() -> None:
    one = dataclasses.replace(report(3, links=[dp(1, [0])]), nccom=1.0)
    assert preflight_checks.parse_rank_report(dataclasses.asdict(one)) == one


def test_the_document_lists_the_consequence_of_each_check() -> None:
    rows = re.findall(r"^\| `(\w+)` .*\| (\w+) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert dict(rows) == {check: one.value for check, one in CONSEQUENCES.items()}
