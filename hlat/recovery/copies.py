"""Lets nothing be saved before all copies of it have been found alike.

Memory that loses a bit, or a sum that is wrong on one rank, makes no number that anybody would
call wrong, and what is saved is one copy of several. So a fault of this kind is found before the
checkpoint that would keep it, and the run goes on from the one before.
"""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from hlat.engine.interface import Disagreement, Engine
from hlat.parallelism.group import tell
from hlat.recovery import host
from hlat.recovery.findings import Consequence, Finding
from hlat.recovery.preflight import exclude
from hlat.tracking.tracker import Tracker

_NAMES_SHOWN = 3


class CopiesDifferError(RuntimeError):
    """Ranks hold different copies of the state, and none of them has most ranks on its side."""


def agree(engine: Engine, tracker: Tracker, step: int) -> bool:
    """Compare all copies of the state; returns whether every node may be trusted.

    A rank whose copy differs from that of most others is told with its node. All ranks call this.

    Raises:
        CopiesDifferError: On all ranks, where there is no telling who is wrong: as with two copies.
    """
    everyone, own = engine.world.everyone, engine.compare_copies()
    told = everyone.collect([host.name(), [asdict(one) for one in own]])
    bad, unclear = judge(told)
    exclude(tracker, bad, step)
    healthy, problem = tell(everyone, [not bad, unclear])
    if healthy and problem:
        raise CopiesDifferError(f"{problem}; step {step} was not saved")
    return bool(healthy)


def judge(told: list[Any]) -> tuple[list[Finding], str]:
    """Who is wrong by what each rank has told, its node and its disagreements, in their order.

    Returns:
        A finding for each rank that is known to be wrong, and what to say of the others.
    """
    every = [Disagreement(**one) for _, found in told for one in found]
    odd: dict[int, list[str]] = {}
    for one in every:
        for rank in one.odd:
            odd.setdefault(rank, []).append(one.name)
    findings = []
    for rank, names in sorted(odd.items()):
        sentence = f"rank {rank}: its copies of {_shown(names)} are not those of most other ranks"
        findings.append(
            Finding(told[rank][0], rank, "copies", False, None, None, sentence, Consequence.exclude)
        )
    unclear = [one for one in every if not one.odd]
    if not unclear:
        return findings, ""
    ranks = sorted({rank for one in unclear for rank in one.ranks})
    return findings, (
        f"ranks {', '.join(map(str, ranks))} hold different copies of "
        f"{_shown(one.name for one in unclear)}"
    )


def _shown(names: Iterable[str]) -> str:
    every = [*dict.fromkeys(names)]
    more = len(every) - _NAMES_SHOWN
    return ", ".join(every[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
