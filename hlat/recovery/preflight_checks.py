"""Pre-flight checks: pure functions from the measurements of all ranks to findings.

Only rank 0 evaluates them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from hlat.config.run import Config
from hlat.engine.interface import DeviceReport, LinkReport
from hlat.mfu import compute_peak_flops
from hlat.plan.memory_estimate import estimate_memory
from hlat.recovery.nccom_bandwidth import NccomResult


class Consequence(Enum):
    """Consequence of a failed check."""

    exclude = "exclude"
    """The node is unhealthy; the run ends with exit code 4."""
    refuse = "refuse"
    """Every other node would fail as well; the run ends with exit code 2."""
    warn = "warn"
    """The run continues."""


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
"""All checks, as listed in docs/preflight.md."""
_RELATIVE_CHECKS = ("speed", "memory", "link")
"""Checks against values of hardware and planner: if every node fails one, the value is wrong."""


@dataclass(frozen=True)
class Finding:
    """Result of one check of one rank or its node.

    Attributes:
        host: Name of the node.
        rank: Rank that the result is about.
        check: Key of CONSEQUENCES.
        ok: True if the check passed.
        measured: Measured value; None if there is none.
        expected: Value that it is compared with, in the same unit.
        sentence: Message for the user if the check failed.
        consequence: Consequence if the check failed.
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
class RankReport:
    """Measurements of one rank, in JSON types.

    Attributes:
        host: Name of the node.
        rank: Global rank.
        open_files: Limit of open files.
        ancestor_pids: Process ids of this process and its ancestors.
        same_command_pids: Other processes of the node with the same command.
        nccom: Result of nccom-test, on the ranks that run it.
        device_report: Measurements of the device and its links.
    """

    host: str
    rank: int
    open_files: int
    ancestor_pids: list[int]
    same_command_pids: list[int]
    nccom: NccomResult | None
    device_report: DeviceReport

    def build_finding(
        self, check: str, ok: bool, measured: float | None, expected: float | None, sentence: str
    ) -> Finding:
        """Return the finding of one check about this rank."""
        return Finding(
            self.host, self.rank, check, ok, measured, expected, sentence, CONSEQUENCES[check]
        )


def format_first(items: Sequence[str], limit: int = 3, separator: str = ", ") -> str:
    """Join the first items, and count the others: "a, b, c and 2 more"."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return separator.join(items[:limit]) + more


def parse_rank_report(value: dict[str, Any]) -> RankReport:
    """Return the report from the output of `dataclasses.asdict`."""
    device, nccom = value["device_report"], value["nccom"]
    links = [LinkReport(**link) for link in device["links"]]
    parsed = {
        "device_report": DeviceReport(**device | {"links": links}),
        "nccom": None if nccom is None else NccomResult(**nccom),
    }
    return RankReport(**value | parsed)


def compute_required_open_files(num_processes: int) -> int:
    """Return the maximum number of files that a process of a run opens.

    Rank 0 has 3 to 6 sockets per process (measured over gloo, 2 to 8 processes), and accelerator
    libraries open their own; the rest is for logs and the corpus.
    """
    return 256 + 8 * num_processes


def check_reports(config: Config, reports: list[RankReport]) -> list[Finding]:
    """Run all checks on the reports of all ranks, given in rank order."""
    findings = [
        *(finding for report in reports for finding in _check_rank(config, report)),
        *_check_all_reduce(reports),
        *_check_links(config, reports),
        *_check_leftover_processes(reports),
    ]
    hosts = {report.host for report in reports}
    return [_downgrade_common_failure(finding, findings, hosts) for finding in findings]


def check_disk_space(
    host: str, directory: str, free_bytes: int, checkpoint_bytes: int, has_checkpoint: bool
) -> Finding:
    """Check for space for the newest checkpoint and the next one during its save."""
    required = checkpoint_bytes * (1 if has_checkpoint else 2)
    checkpoints = "the next checkpoint takes" if has_checkpoint else "two checkpoints take"
    sentence = (
        f"run.root: {directory} has {_format_gib(free_bytes)} GiB free on {host}, and "
        f"{checkpoints} {_format_gib(required)}; free some, or set run.root or "
        "checkpoint.destination to a larger disk"
    )
    ok, consequence = free_bytes >= required, CONSEQUENCES["disk"]
    return Finding(host, 0, "disk", ok, free_bytes, required, sentence, consequence)


def check_clock(report: RankReport, bounds: tuple[float, float], max_skew_s: float) -> Finding:
    """Compare a clock with that of rank 0.

    Only the certain part of the skew counts, since the bounds include the latency of a message.

    Args:
        report: Report of the rank.
        bounds: Minimum and maximum seconds by which the clock is ahead.
        max_skew_s: Maximum skew without a warning.
    """
    least, greatest = bounds
    skew = least if least > 0 else min(greatest, 0.0)
    sentence = (
        f"the clock of node {report.host} is {skew:+.1f} s off the first node's, more than "
        f"recovery.max_clock_skew_s={max_skew_s:g}; check its time service"
    )
    return report.build_finding("clock", abs(skew) <= max_skew_s, skew, max_skew_s, sentence)


def find_faulty_ranks(pairs: Iterable[tuple[int, int]]) -> list[int]:
    """Return the fewest ranks that explain all failing pairs.

    The rank with the most pairs is taken first; ties are all taken.
    """
    remaining, faulty = {(min(pair), max(pair)) for pair in pairs}, set[int]()
    while remaining:
        counts = Counter(rank for pair in remaining for rank in {*pair})
        most = max(counts.values())
        faulty |= {rank for rank, count in counts.items() if count == most}
        remaining = {pair for pair in remaining if not faulty & {*pair}}
    return sorted(faulty)


def _check_rank(config: Config, report: RankReport) -> Iterator[Finding]:
    device, prefix = report.device_report, f"rank {report.rank}: "
    sentence = (
        f"{prefix}{device.num_wrong} wrong elements in {device.num_products} matmuls with known "
        "result"
    )
    ok = device.num_wrong == 0
    yield report.build_finding("arithmetic", ok, device.num_wrong, 0, sentence)
    dtype, min_share = config.precision.compute, config.recovery.min_speed_share
    peak = compute_peak_flops(config.hardware, 1, dtype)
    if peak is not None:
        measured, expected = device.flops_per_s, peak * min_share
        sentence = (
            f"{prefix}{measured / 1e12:.3g} TFLOP/s in matmuls, less than {min_share:g} of "
            f"hardware.peak_tflops.{dtype.value}={peak / 1e12:g}"
        )
        yield report.build_finding("speed", measured >= expected, measured, expected, sentence)
    if device.free_bytes is not None and device.total_bytes is not None:
        free, required = device.free_bytes, estimate_memory(config).total
        sentence = (
            f"{prefix}{_format_gib(free)} of {_format_gib(device.total_bytes)} GiB are free on "
            f"{device.device}, and the run takes {_format_gib(required)}: another process uses it"
        )
        yield report.build_finding("memory", free >= required, free, required, sentence)
    limit, required = report.open_files, compute_required_open_files(config.num_processes)
    sentence = (
        f"node {report.host} limits a process to {limit} open files, and a process of this run "
        f"needs {required}; raise the hard limit (ulimit -Hn) to at least that"
    )
    yield report.build_finding("open_files", limit >= required, limit, required, sentence)
    if report.nccom is not None:
        yield from _check_nccom(config, report, report.nccom)


def _check_nccom(config: Config, report: RankReport, nccom: NccomResult) -> Iterator[Finding]:
    if nccom.bytes_per_s is None:
        sentence = f"nccom-test failed on {report.host}: {nccom.problem}"
        yield report.build_finding("nccom", False, None, None, sentence)
    elif (link := config.hardware.link_gb_per_s) is not None:
        ok = nccom.bytes_per_s >= config.recovery.min_speed_share * link * 1e9
        bandwidth = (nccom.bytes_per_s, link * 1e9)
        yield _build_link_finding(config, report, "nccom-test's", bandwidth, ok)


def _check_all_reduce(reports: list[RankReport]) -> Iterator[Finding]:
    """Check sums: the ranks that explain wrong pairs are faulty, else those with a wrong result."""
    for (axis, ranks), members in _group_links_by_axis(reports).items():
        pairs = {(first, second) for _, link in members for first, second in link.wrong_pairs}
        faulty = find_faulty_ranks(pairs) or [
            report.rank for report, link in members if link.num_wrong
        ]
        for report, link in members:
            sentence = (
                f"rank {report.rank}: all-reduce over {axis}={len(ranks)} ranks is wrong where it "
                "takes part"
            )
            ok = report.rank not in faulty
            yield report.build_finding("sum", ok, link.num_wrong, 0, sentence)


def _check_links(config: Config, reports: list[RankReport]) -> Iterator[Finding]:
    """Check bandwidths: the ranks that explain slow pairs are faulty.

    If all pairs are fast and the axis is slow, no rank can be named and every one gets a warning.
    """
    for (axis, ranks), members in _group_links_by_axis(reports).items():
        pairs = {(first, second) for _, link in members for first, second in link.slow_pairs}
        faulty = find_faulty_ranks(pairs)
        for report, link in members:
            if link.expected_bytes_per_s is None:
                continue
            group_name = f"{axis}={len(ranks)} ranks"
            measured, expected = bandwidth = (link.bytes_per_s, link.expected_bytes_per_s)
            if faulty:
                ok = report.rank not in faulty
                yield _build_link_finding(config, report, group_name, bandwidth, ok)
            else:
                ok = measured >= config.recovery.min_speed_share * expected
                finding = _build_link_finding(config, report, group_name, bandwidth, ok)
                yield replace(finding, consequence=Consequence.warn)


def _build_link_finding(
    config: Config, report: RankReport, group_name: str, bandwidth: tuple[float, float], ok: bool
) -> Finding:
    min_share, (measured, expected) = config.recovery.min_speed_share, bandwidth
    sentence = (
        f"rank {report.rank}: all-reduce over {group_name} reaches {measured / 1e9:.3g} GB/s, less "
        f"than {min_share:g} of the {expected / 1e9:g} GB/s of hardware={config.hardware.name}"
    )
    return report.build_finding("link", ok, measured, min_share * expected, sentence)


def _check_leftover_processes(reports: list[RankReport]) -> Iterator[Finding]:
    """Check for processes with the same command outside this attempt's process trees."""
    related = {(report.host, pid) for report in reports for pid in report.ancestor_pids}
    for report in reports:
        pids = [pid for pid in report.same_command_pids if (report.host, pid) not in related]
        sentence = (
            f"processes {', '.join(map(str, pids))} on {report.host} were left by an earlier "
            "attempt at this run and may still use its devices; kill them"
        )
        yield report.build_finding("left_over", not pids, len(pids), 0, sentence)


def _group_links_by_axis(
    reports: list[RankReport],
) -> dict[tuple[str, tuple[int, ...]], list[tuple[RankReport, LinkReport]]]:
    """Return the reports of each group of ranks, by axis name and ranks."""
    groups: dict[tuple[str, tuple[int, ...]], list[tuple[RankReport, LinkReport]]] = {}
    for report in reports:
        for link in report.device_report.links:
            groups.setdefault((link.axis, tuple(link.ranks)), []).append((report, link))
    return groups


def _downgrade_common_failure(
    finding: Finding, findings: list[Finding], hosts: set[str]
) -> Finding:
    """Turn a failure of a relative check into a warning if all of several nodes fail it."""
    if finding.ok or finding.check not in _RELATIVE_CHECKS or len(hosts) == 1:
        return finding
    failed = {other.host for other in findings if other.check == finding.check and not other.ok}
    return replace(finding, consequence=Consequence.warn) if failed == hosts else finding


def _format_gib(size: float) -> str:
    return f"{size / 2**30:,.2f}"
