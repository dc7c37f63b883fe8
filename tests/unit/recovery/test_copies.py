"""Who is wrong, by what all ranks tell of copies that differ."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from hlat.engine.interface import Disagreement, World
from hlat.recovery import copies

NAMES = [f"weights/{letter}" for letter in "abcde"]


class Engine:
    """One rank of several, of which all have found the same."""

    def __init__(self, size: int, found: list[Disagreement]) -> None:
        self.size, self.found = size, found
        self.world = World(everyone=self)
        self.leads = True

    def compare_copies(self) -> list[Disagreement]:
        return self.found

    def collect(self, value: Any) -> list[Any]:
        return [value] * self.size

    def broadcast(self, message: bytes) -> bytes:
        return message


class Tracker:
    """Keeps events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, dict[str, Any]]] = []

    def event(self, event: str, step: int, **details: Any) -> None:
        self.events.append((event, step, details))


def test_copies_that_agree_are_saved() -> None:
    tracker = Tracker()
    assert copies.agree(Engine(4, []), tracker, 7)
    assert not tracker.events


def test_the_rank_that_most_others_contradict_is_told_with_its_node(capsys, monkeypatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "trn-7")
    tracker = Tracker()
    found = [Disagreement(name, [0, 2, 4, 6], [4]) for name in NAMES]
    assert not copies.agree(Engine(8, found), tracker, 7)
    told = capsys.readouterr().err
    sentence = (
        "rank 4: its copies of weights/a, weights/b, weights/c and 2 more are not those of most "
        "other ranks"
    )
    assert told == (
        f"hlat: node trn-7 is unhealthy: {sentence}; exclude it and start the same command again\n"
    )
    detail = {"host": "trn-7", "ranks": [4], "reasons": [sentence]}
    assert tracker.events == [("exclude", 7, detail)]


def test_of_two_nobody_is_accused() -> None:
    tracker = Tracker()
    with pytest.raises(copies.CopiesDifferError) as error:
        copies.agree(Engine(4, [Disagreement(NAMES[0], [1, 3], [])]), tracker, 7)
    assert str(error.value) == (
        "ranks 1, 3 hold different copies of weights/a; step 7 was not saved"
    )
    assert not tracker.events


def test_who_is_known_to_be_wrong_ends_the_run_whatever_else_differs() -> None:
    some = [Disagreement(NAMES[0], [0, 1], []), Disagreement(NAMES[1], [1, 3, 5], [3])]
    told = json.loads(
        json.dumps([[f"n{rank}", [asdict(one) for one in some]] for rank in range(6)])
    )
    found, unclear = copies.judge(told)
    assert {(one.host, one.rank) for one in found} == {("n3", 3)}
    assert unclear == "ranks 0, 1 hold different copies of weights/a"
