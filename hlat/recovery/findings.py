"""What pre-flight makes of what all ranks have measured: which node is well, and what follows.

It is arithmetic on plain data, done once, by the first rank.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from hlat.config.run import Config
from hlat.engine.interface import Examination, Link
from hlat.hardware import peak_flops
from hlat.planning.memory import estimate
from hlat.recovery.nccom import Nccom


class Consequence(Enum):
    """What follows when a check fails."""

    exclude = "exclude"
    """The node is unhealthy; the run ends with exit code 4."""
    refuse = "refuse"
    """Another node would fail as well; the run ends with exit code 2."""
    warn = "warn"
    """The run goes on."""


CONSEQUENCES = {
    "devices": Consequence.exclude,
    "arithmetic": Consequence.exclude,
    "speed": Consequence.exclude,
    "memory": Consequence.exclude,
    "sum": Consequence.exclude,
    "link": Consequence.exclude,
    "open_files": Consequence.refuse,
    "disk": Consequence.refuse,
    "clock": Consequence.warn,
    "left_over": Consequence.warn,
    "nccom": Consequence.warn,
}
"""Every check, as docs/preflight.md lists them."""
_RELATIVE = ("speed", "memory", "link")
"""Checks against what hardware and planner claim: if every node fails one, the claim is wrong."""


@dataclass(frozen=True)
class Finding:
    """One check of one rank, or of its node.

    Attributes:
        host: Name of the node.
        rank: The rank that measured, or that others accuse.
        check: A key of CONSEQUENCES.
        ok: Whether it passed.
        measured: Number that was found; None: there is none.
        expected: Number that it is compared with, in the same unit.
        sentence: What a person should read when it failed.
        consequence: What follows when it failed.
    """

    host: str
    rank: int
    check: str
    ok: bool
    measured: float | None
    expected: float | None
    sentence: str
    consequence: Consequence


@dataclass(frozen=True)
class Report:
    """What one rank tells the first, as JSON knows it.

    Attributes:
        host: Name of its node.
        rank: Its number.
        open_files: Files that it may open at a time.
        family: Its process id and those of the processes it descends from.
        same_command: Other processes of its node that run the same command.
        nccom: What nccom-test measured, where it ran.
        examination: Of its device and links.
    """

    host: str
    rank: int
    open_files: int
    family: list[int]
    same_command: list[int]
    nccom: Nccom | None
    examination: Examination


def report_from_json(value: dict[str, Any]) -> Report:
    """The report of which `dataclasses.asdict` made this."""
    examination, nccom = value["examination"], value["nccom"]
    links = [Link(**link) for link in examination["links"]]
    return Report(
        **value
        | {
            "examination": Examination(**examination | {"links": links}),
            "nccom": None if nccom is None else Nccom(**nccom),
        }
    )


def needed_open_files(num_processes: int) -> int:
    """Files that a process of a run opens at most.

    On the first rank each process is 3 to 6 sockets (measured over gloo, 2 to 8 processes), and the
    libraries of accelerators have their own; the rest is for logs and the corpus.
    """
    return 256 + 8 * num_processes


def judge(config: Config, reports: list[Report]) -> list[Finding]:
    """Every check of every rank that its report can answer; reports are in the ranks' order."""
    findings = [
        *(finding for report in reports for finding in _of_rank(config, report)),
        *_of_sums(reports),
        *_of_links(config, reports),
        *_left_over(reports),
    ]
    hosts = {report.host for report in reports}
    return [_relative(finding, findings, hosts) for finding in findings]


def disk(host: str, folder: str, free: int, checkpoint_bytes: int, has_one: bool) -> Finding:
    """Room for two checkpoints: the newest, and the next while it is written."""
    needed = checkpoint_bytes * (1 if has_one else 2)
    sentence = (
        f"run.root: {folder} has {_gib(free)} GiB free on {host}, and "
        f"{'the next checkpoint takes' if has_one else 'two checkpoints take'} {_gib(needed)}; "
        "free some, or set run.root or checkpoint.destination to a larger disk"
    )
    return _finding(host, 0, "disk", free >= needed, free, needed, sentence)


def clock(report: Report, bounds: tuple[float, float], most: float) -> Finding:
    """A clock against the first rank's, from the least and the most seconds it may be ahead.

    Only what is certain counts: the bounds are as far apart as a message takes.
    """
    least, greatest = bounds
    skew = least if least > 0 else min(greatest, 0.0)
    sentence = (
        f"the clock of node {report.host} is {skew:+.1f} s off the first node's, more than "
        f"recovery.max_clock_skew_s={most:g}; check its time service"
    )
    return _finding(report.host, report.rank, "clock", abs(skew) <= most, skew, most, sentence)


def missing(host: str, rank: int, sentence: str) -> Finding:
    """A node has fewer devices than its kind."""
    return _finding(host, rank, "devices", False, None, None, sentence)


def blame(pairs: Iterable[tuple[int, int]]) -> list[int]:
    """The fewest ranks that explain why something is wrong between the two of each pair.

    A rank that is part of most pairs is taken first; of equals, all are.
    """
    left, found = {(min(pair), max(pair)) for pair in pairs}, set[int]()
    while left:
        counts = Counter(rank for pair in left for rank in {*pair})
        most = max(counts.values())
        found |= {rank for rank, count in counts.items() if count == most}
        left = {pair for pair in left if not found & {*pair}}
    return sorted(found)


def _of_rank(config: Config, report: Report) -> Iterator[Finding]:
    def found(check: str, ok: bool, measured: float, expected: float, sentence: str) -> Finding:
        where = f"rank {report.rank}: {sentence}"
        return _finding(report.host, report.rank, check, ok, measured, expected, where)

    one = report.examination
    wrong = f"{one.num_wrong} wrong elements in {one.num_products} matrix products of known answer"
    yield found("arithmetic", one.num_wrong == 0, one.num_wrong, 0, wrong)
    dtype, share = config.precision.compute, config.recovery.min_speed_share
    peak = peak_flops(config.hardware, 1, dtype)
    if peak is not None:
        least = peak * share
        slow = (
            f"{one.flops_per_s / 1e12:.3g} TFLOP/s in matrix products, less than {share:g} of "
            f"hardware.peak_tflops.{dtype.value}={peak / 1e12:g}"
        )
        yield found("speed", one.flops_per_s >= least, one.flops_per_s, least, slow)
    if one.free_bytes is not None and one.total_bytes is not None:
        need = estimate(config).total
        held = (
            f"{_gib(one.free_bytes)} of {_gib(one.total_bytes)} GiB are free on {one.device}, and "
            f"the run takes {_gib(need)}: something else holds it"
        )
        yield found("memory", one.free_bytes >= need, one.free_bytes, need, held)
    files = needed_open_files(config.num_processes)
    limit = (
        f"node {report.host} lets a process open {report.open_files} files, and one of this run "
        f"needs {files}; raise its hard limit (ulimit -Hn) to that or more"
    )
    number = report.open_files
    yield _finding(report.host, report.rank, "open_files", number >= files, number, files, limit)
    if report.nccom is not None:
        yield from _of_nccom(config, report, report.nccom)


def _of_nccom(config: Config, report: Report, nccom: Nccom) -> Iterator[Finding]:
    if nccom.bytes_per_s is None:
        sentence = f"nccom-test measured nothing on {report.host}: {nccom.problem}"
        yield _finding(report.host, report.rank, "nccom", False, None, None, sentence)
    elif (link := config.hardware.link_gb_per_s) is not None:
        fast = nccom.bytes_per_s >= config.recovery.min_speed_share * link * 1e9
        yield _link(config, report, "nccom-test's", (nccom.bytes_per_s, link * 1e9), fast)


def _of_sums(reports: list[Report]) -> Iterator[Finding]:
    """Ranks that explain which pairs add up wrongly, or else those that got a wrong sum."""
    for name, ranks, members in _axes(reports):
        pairs = {(one, other) for _, link in members for one, other in link.wrong_pairs}
        blamed = blame(pairs) or [report.rank for report, link in members if link.num_wrong]
        for report, link in members:
            sentence = (
                f"rank {report.rank}: sums over {name}={len(ranks)} ranks come out wrong where it "
                "takes part"
            )
            ok = report.rank not in blamed
            yield _finding(report.host, report.rank, "sum", ok, link.num_wrong, 0, sentence)


def _of_links(config: Config, reports: list[Report]) -> Iterator[Finding]:
    """Ranks whose sums with a neighbour are slow, where those over an axis were.

    Where all pairs are fast and the axis is not, nobody can be named, and everybody is warned.
    """
    for name, ranks, members in _axes(reports):
        pairs = {(first, second) for _, link in members for first, second in link.slow_pairs}
        blamed = blame(pairs)
        for report, link in members:
            if link.expected_bytes_per_s is None:
                continue
            over = f"{name}={len(ranks)} ranks"
            speed = (link.bytes_per_s, link.expected_bytes_per_s)
            if blamed:
                yield _link(config, report, over, speed, report.rank not in blamed)
            else:
                fast = speed[0] >= config.recovery.min_speed_share * speed[1]
                finding = _link(config, report, over, speed, fast)
                yield replace(finding, consequence=Consequence.warn)


def _link(
    config: Config, report: Report, over: str, speed: tuple[float, float], ok: bool
) -> Finding:
    share, (measured, expected) = config.recovery.min_speed_share, speed
    sentence = (
        f"rank {report.rank}: sums over {over} reach {measured / 1e9:.3g} GB/s, less than "
        f"{share:g} of the {expected / 1e9:g} GB/s of hardware={config.hardware.name}"
    )
    return _finding(report.host, report.rank, "link", ok, measured, share * expected, sentence)


def _left_over(reports: list[Report]) -> Iterator[Finding]:
    """Processes of the same command that are no relatives of this attempt's, by node."""
    related = {(report.host, number) for report in reports for number in report.family}
    for report in reports:
        strange = [n for n in report.same_command if (report.host, n) not in related]
        sentence = (
            f"processes {', '.join(map(str, strange))} on {report.host} were left by an earlier "
            "attempt at this run and may hold its devices; kill them"
        )
        yield _finding(
            report.host, report.rank, "left_over", not strange, len(strange), 0, sentence
        )


def _axes(reports: list[Report]) -> Iterator[tuple[str, list[int], list[tuple[Report, Link]]]]:
    """Every group of ranks that has added up: the axis' name, the ranks, what each has seen."""
    groups: dict[tuple[str, tuple[int, ...]], list[tuple[Report, Link]]] = {}
    for report in reports:
        for link in report.examination.links:
            groups.setdefault((link.axis, tuple(link.ranks)), []).append((report, link))
    for (name, ranks), members in groups.items():
        yield name, [*ranks], members


def _relative(finding: Finding, findings: list[Finding], hosts: set[str]) -> Finding:
    """The finding, as a warning where every one of several nodes fails the same claim."""
    if finding.ok or finding.check not in _RELATIVE or len(hosts) == 1:
        return finding
    failed = {other.host for other in findings if other.check == finding.check and not other.ok}
    return replace(finding, consequence=Consequence.warn) if failed == hosts else finding


def _finding(
    host: str,
    rank: int,
    check: str,
    ok: bool,
    measured: float | None,
    expected: float | None,
    sentence: str,
) -> Finding:
    return Finding(host, rank, check, ok, measured, expected, sentence, CONSEQUENCES[check])


def _gib(size: float) -> str:
    return f"{size / 2**30:,.2f}"
