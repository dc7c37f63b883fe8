"""A check that raises is recorded, and the wait for other ranks is bounded."""

from types import SimpleNamespace

from hlat.distributed.object_group import SingleRankGroup
from hlat.doctor import check_runner
from hlat.doctor.check_result import CheckStatus


class FakeHeartbeat:
    def __init__(self) -> None:
        self.deadlines: list[float] = []
        self.has_started = False

    def set_deadline(self, seconds: float) -> None:
        self.deadlines.append(seconds)


def test_a_check_that_raises_bounds_the_wait_for_other_ranks(monkeypatch) -> None:
    def fail(harness):
        raise IndexError("tuple index out of range")

    heartbeat = FakeHeartbeat()
    monkeypatch.setattr(check_runner, "CHECKS", {"causality": fail, "labels": lambda harness: []})
    monkeypatch.setattr(check_runner, "open_heartbeat", lambda: heartbeat)
    harness = SimpleNamespace(
        config=SimpleNamespace(recovery=SimpleNamespace(start_timeout_s=900)),
        engine=SimpleNamespace(parallel_state=SimpleNamespace(world_group=SingleRankGroup())),
        is_rank0=True,
    )
    (result,) = check_runner.run_checks(harness, ["causality", "labels"])
    assert result.status is CheckStatus.failed
    assert result.message == "the check raised IndexError: tuple index out of range on rank 0"
    assert heartbeat.deadlines == [900, 60, 900]
