"""Examines every node before the first step, and tells which of them cannot be trusted.

A device that computes wrongly or a link that crawls costs a whole run days, and a minute at its
start finds it. All ranks measure, the first one judges, and all of them end or go on together.
"""

import shutil
import sys
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hlat.checkpoint import places
from hlat.config.errors import ConfigError, Exit, MissingDeviceError
from hlat.config.run import Config
from hlat.engine import processes, tracing
from hlat.engine.interface import Engine, Examination
from hlat.parallelism.group import Group, tell
from hlat.planning.disk import checkpoint_bytes
from hlat.recovery import findings, host, nccom
from hlat.recovery.findings import Consequence, Finding, Report, report_from_json
from hlat.tracking.tracker import Tracker

_CLOCK_ROUNDS = 3
_REASONS_SHOWN = 3
"""Of a node, on the console; the event has all."""


def passed(config: Config, folder: Path, engine: Engine) -> bool:
    """Whether every node of the run may train; told on the console and in events.jsonl if not.

    The engine has met the other processes then, and is closed where one of them is unhealthy.

    Raises:
        ConfigError: What fails would fail on every other node.
        SystemExit: This process has no device, so it cannot agree with the others on anything.
    """
    if not config.recovery.preflight or tracing.only_traces():
        return True
    begun = time.perf_counter()
    own = _report(config, folder, engine)
    everyone = engine.world.everyone
    bounds = clock_bounds(everyone)
    reports = [report_from_json(one) for one in everyone.collect(asdict(own))]
    verdict = None
    if everyone.leads:
        found = [
            *findings.judge(config, reports),
            *_clocks(config, reports, bounds),
            *_disk(config, folder, own.host),
        ]
        failed = [finding for finding in found if not finding.ok]
        verdict = _record(config, folder, reports, failed, time.perf_counter() - begun)
    problems, healthy = tell(everyone, verdict)
    if problems:
        raise ConfigError(*problems)
    if not healthy:
        engine.close()
    return bool(healthy)


def clock_bounds(everyone: Group) -> list[tuple[float, float]]:
    """On the leader, the least and most seconds by which each rank's clock is ahead of its own.

    A rank reads its clock after the leader has asked and before it has the answer, so the clock is
    ahead by what it shows less something in between; a few rounds narrow that down.
    """
    rounds = []
    for _ in range(_CLOCK_ROUNDS):
        asked = time.time()
        tell(everyone, None)
        shown = everyone.collect(time.time())
        answered = time.time()
        rounds.append([(one - answered, one - asked) for one in shown])
    return [
        (max(least for least, _ in one), min(most for _, most in one))
        for one in zip(*rounds, strict=True)
    ]


def _report(config: Config, folder: Path, engine: Engine) -> Report:
    """Measure this process's node and device."""
    place = processes.place()
    first_here = place.local_rank == 0
    name, benchmark = host.name(), None
    if first_here and nccom.wanted(config.hardware):
        benchmark = nccom.measure(config.hardware)
    examination = _examine(config, folder, engine)
    return Report(
        host=name,
        rank=engine.world.rank,
        open_files=host.allow_open_files(findings.needed_open_files(config.num_processes)),
        family=host.family(),
        same_command=host.same_command() if first_here else [],
        nccom=benchmark,
        examination=examination,
    )


def _examine(config: Config, folder: Path, engine: Engine) -> Examination:
    """Examine the device, or end alone where hardware says that the node has one and it has not."""
    try:
        return engine.examine(config)
    except MissingDeviceError as error:
        if config.hardware.processes_per_node is None:
            raise
        finding = findings.missing(host.name(), processes.place().rank, str(error))
        exclude(Tracker(folder, config), [finding])
        raise SystemExit(Exit.UNHEALTHY_NODE) from error


def _clocks(
    config: Config, reports: list[Report], bounds: list[tuple[float, float]]
) -> list[Finding]:
    most = config.recovery.max_clock_skew_s
    return [findings.clock(report, one, most) for report, one in zip(reports, bounds, strict=True)]


def _disk(config: Config, folder: Path, host_name: str) -> list[Finding]:
    """Room for checkpoints, if they go to a disk."""
    home = places.home(folder, config.checkpoint.destination)
    if not isinstance(home, Path):
        return []
    has_one = any((home / "checkpoints").glob("step_*"))
    free = shutil.disk_usage(home).free
    return [findings.disk(host_name, str(home), free, checkpoint_bytes(config), has_one)]


def _record(
    config: Config, folder: Path, reports: list[Report], failed: list[Finding], seconds: float
) -> tuple[list[str], bool]:
    """Write and tell what was found; return the user's mistakes, and whether all nodes are well."""
    tracker = Tracker(folder, config)
    by_consequence = {
        consequence: [finding for finding in failed if finding.consequence is consequence]
        for consequence in Consequence
    }
    for sentence in dict.fromkeys(one.sentence for one in by_consequence[Consequence.warn]):
        tracker.say(f"WARNING: {sentence}")
    tracker.event(
        "preflight",
        0,
        seconds=round(seconds, 3),
        nodes=_speeds(reports),
        failed=[asdict(finding) | {"consequence": finding.consequence.value} for finding in failed],
    )
    exclude(tracker, by_consequence[Consequence.exclude])
    problems = [*dict.fromkeys(one.sentence for one in by_consequence[Consequence.refuse])]
    return problems, not by_consequence[Consequence.exclude]


def exclude(tracker: Tracker, bad: list[Finding], step: int = 0) -> None:
    """Write an event and a line on the console for each unhealthy node."""
    by_host = defaultdict(list)
    for finding in bad:
        by_host[finding.host].append(finding)
    for name, found in by_host.items():
        reasons = [finding.sentence for finding in found]
        ranks = sorted({finding.rank for finding in found})
        tracker.event("exclude", step, host=name, ranks=ranks, reasons=reasons)
        more = len(reasons) - _REASONS_SHOWN
        shown = reasons[:_REASONS_SHOWN] + ([f"and {more} more"] if more > 0 else [])
        told = f"node {name} is unhealthy: {'; '.join(shown)}"
        print(f"hlat: {told}; exclude it and start the same command again", file=sys.stderr)


def _speeds(reports: list[Report]) -> dict[str, dict[str, Any]]:
    """By node, the device and the slowest of its processes."""
    by_host = defaultdict(list)
    for report in reports:
        by_host[report.host].append(report)
    return {
        name: {
            "device": there[0].examination.device,
            "flops_per_s": min(report.examination.flops_per_s for report in there),
            "bytes_per_s": _slowest(there),
        }
        for name, there in by_host.items()
    }


def _slowest(reports: list[Report]) -> dict[str, float]:
    speeds = defaultdict(list)
    for report in reports:
        for link in report.examination.links:
            speeds[link.axis].append(link.bytes_per_s)
        if report.nccom is not None and report.nccom.bytes_per_s is not None:
            speeds["nccom"].append(report.nccom.bytes_per_s)
    return {axis: min(each) for axis, each in speeds.items()}
