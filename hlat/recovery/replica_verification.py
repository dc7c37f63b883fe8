"""Comparison of all replicas of the state before each save.

A bit flip in memory or a wrong all-reduce on one rank leaves every metric finite, and a checkpoint
contains only one replica. The comparison finds such a fault before the checkpoint stores it, so the
run continues from the previous one.
"""

from collections import defaultdict
from dataclasses import asdict
from typing import Any

from hlat.distributed.object_group import broadcast_object
from hlat.engine.interface import Engine, ReplicaMismatch
from hlat.recovery import host_info
from hlat.recovery.preflight import report_unhealthy_nodes
from hlat.recovery.preflight_checks import Consequence, Finding, format_first
from hlat.tracking.tracker import Tracker


class ReplicaMismatchError(RuntimeError):
    """Error for replicas that differ without a majority."""


def verify_replicas(engine: Engine, tracker: Tracker, step: int) -> bool:
    """Compare all replicas of the state; return True if every node is healthy.

    A rank whose replica differs from the majority is reported. This is a collective call.

    Raises:
        ReplicaMismatchError: On all ranks, if replicas differ without a majority.
    """
    group, mismatches = engine.parallel_state.world_group, engine.find_replica_mismatches()
    reports = group.gather_object(
        [host_info.get_host_name(), [asdict(mismatch) for mismatch in mismatches]]
    )
    findings, problem = find_mismatched_ranks(reports)
    report_unhealthy_nodes(tracker, findings, step)
    healthy, problem = broadcast_object(group, [not findings, problem])
    if healthy and problem:
        raise ReplicaMismatchError(f"{problem}; step {step} was not saved")
    return bool(healthy)


def find_mismatched_ranks(reports: list[Any]) -> tuple[list[Finding], str]:
    """Return one finding per faulty rank, and a description of mismatches without a majority.

    Args:
        reports: Host name and mismatches of each rank, in rank order.
    """
    mismatches = [ReplicaMismatch(**item) for _, items in reports for item in items]
    names_by_rank = defaultdict(list)
    for mismatch in mismatches:
        for rank in mismatch.odd:
            names_by_rank[rank].append(mismatch.name)
    findings = [
        Finding(
            reports[rank][0],
            rank,
            check="copies",
            measured=None,
            expected=None,
            sentence=f"rank {rank}: its replicas of {_format_names(names)} differ from those of "
            "most other ranks",
            consequence=Consequence.exclude,
        )
        for rank, names in sorted(names_by_rank.items())
    ]
    undecided = [mismatch for mismatch in mismatches if not mismatch.odd]
    if not undecided:
        return findings, ""
    ranks = sorted({rank for mismatch in undecided for rank in mismatch.ranks})
    names = _format_names([mismatch.name for mismatch in undecided])
    return findings, f"ranks {', '.join(map(str, ranks))} have different replicas of {names}"


def _format_names(names: list[str]) -> str:
    return format_first([*dict.fromkeys(names)])
