"""Faulty ranks found from the replica mismatches of all ranks."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from hlat.distributed.parallel_state import ParallelState
from hlat.engine.interface import ReplicaMismatch
from hlat.recovery import replica_verification

NAMES = [f"weights/{letter}" for letter in "abcde"]


class Engine:
    """Engine of rank 0; all ranks find the same mismatches."""

    def __init__(self, size: int, found: list[ReplicaMismatch]) -> None:
        self.size, self.found = size, found
        self.parallel_state = ParallelState(world_group=self)
        self.is_rank0 = True

    def find_replica_mismatches(self) -> list[ReplicaMismatch]:
        return self.found

    def gather_object(self, value: Any) -> list[Any]:
        return [value] * self.size

    def broadcast(self, message: bytes) -> bytes:
        return message


class Tracker:
    """List of events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, dict[str, Any]]] = []

    def log_event(self, event: str, step: int, **details: Any) -> None:
        self.events.append((event, step, details))


def test_equal_replicas_are_saved() -> None:
    tracker = Tracker()
    assert replica_verification.verify_replicas(Engine(4, []), tracker, 7)
    assert not tracker.events


def test_the_rank_that_differs_from_most_others_is_reported_with_its_node(
    capsys, monkeypatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "trn-7")
    tracker = Tracker()
    found = [ReplicaMismatch(name, [0, 2, 4, 6], [4]) for name in NAMES]
    assert not replica_verification.verify_replicas(Engine(8, found), tracker, 7)
    reported = capsys.readouterr().err
    sentence = (
        "rank 4: its replicas of weights/a, weights/b, weights/c and 2 more differ from those of "
        "most other ranks"
    )
    assert reported == (
        f"hlat: node trn-7 is unhealthy: {sentence}; exclude it and start the same command again\n"
    )
    detail = {"host": "trn-7", "ranks": [4], "reasons": [sentence]}
    assert tracker.events == [("exclude", 7, detail)]


def test_a_mismatch_of_two_ranks_is_not_attributed() -> None:
    tracker = Tracker()
    with pytest.raises(replica_verification.ReplicaMismatchError) as error:
        replica_verification.verify_replicas(
            Engine(4, [ReplicaMismatch(NAMES[0], [1, 3], [])]), tracker, 7
        )
    assert str(error.value) == (
        "ranks 1, 3 have different replicas of weights/a; step 7 was not saved"
    )
    assert not tracker.events


def test_a_faulty_rank_is_found_among_unclear_mismatches() -> None:
    some = [ReplicaMismatch(NAMES[0], [0, 1], []), ReplicaMismatch(NAMES[1], [1, 3, 5], [3])]
    reported = json.loads(
        json.dumps([[f"n{rank}", [asdict(one) for one in some]] for rank in range(6)])
    )
    found, unclear = replica_verification.find_mismatched_ranks(reported)
    assert {(one.host, one.rank) for one in found} == {("n3", 3)}
    assert unclear == "ranks 0, 1 have different replicas of weights/a"
