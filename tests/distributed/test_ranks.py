"""Tests that start processes run in one pytest worker, and a closed engine has no threads."""

import os

import pytest

from tests.distributed import checks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("processes")]


def test_one_worker_runs_all_tests_that_start_processes(request: pytest.FixtureRequest) -> None:
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("not run with --dist loadgroup")
    assert request.node.nodeid.endswith("@processes")


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_closed_engine_leaves_no_threads(ranks, configure) -> None:
    config = configure("dp=2 zero=1")
    ranks.run(2, checks.train, config, 1)
    before = ranks.run(2, num_threads)
    ranks.run(2, checks.train, config, 1)
    assert ranks.run(2, num_threads) == before
