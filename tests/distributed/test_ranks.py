"""The tests that start processes keep to one of pytest's workers, or they slow each other."""

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("processes")]


def test_one_worker_runs_all_that_start_processes(request: pytest.FixtureRequest) -> None:
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("not run with --dist loadgroup")
    assert request.node.nodeid.endswith("@processes")
