"""Pre-flight checks: pure functions from the measurements of all ranks to findings, on rank 0."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from hlat.config.mfu import compute_peak_flops
from hlat.config.precision import RoundingMode
from hlat.config.run import Config
from hlat.engine.interface import DeviceReport, LinkReport
from hlat.plan.memory_estimate import estimate_memory
from hlat.tracking.text_format import format_gib


class Consequence(Enum):
    """Consequence of a failed check."""

    exclude = "exclude"
    """The node is unhealthy; the run ends with exit code 4."""
    refuse = "refuse"
    """Every other node would fail as well; the run ends with exit code 2."""
    warn = "warn"
    """The run continues."""


CONSEQUENCES = {
    **dict.fromkeys(("devices", "arithmetic", "speed", "memory"), Consequence.exclude),
    **dict.fromkeys(("sum", "link"), Consequence.exclude),
    **dict.fromkeys(("open_files", "disk", "rounding"), Consequence.refuse),
    **dict.fromkeys(("clock", "left_over", "nccom"), Consequence.warn),
}
"""All checks, as listed in docs/preflight.md."""
_RELATIVE_CHECKS = ("speed", "memory", "link")
"""Checks against values of hardware and planner: if every node fails one, the value is wrong."""


_ROUNDED_UP_SHARES = {RoundingMode.nearest: 0.0, RoundingMode.stochastic: 0.125}
"""Share of casts of 1 + 2^-10 to bf16, whose spacing at 1 is 2^-7, that are rounded up."""
_ROUNDED_UP_TOLERANCE = 0.03


@dataclass(frozen=True)
class Finding:
    """Failed check of one rank or its node: `check` is a key of CONSEQUENCES.

    `measured` is None without a value; `expected` is in the same unit. `sentence` is for the user.
    """

    host: str
    rank: int
    check: str
    ok: bool = field(default=False, init=False)
    measured: float | None
    expected: float | None
    sentence: str
    consequence: Consequence


@dataclass(frozen=True)
class RankReport:
    """Measurements of one rank, in JSON types.

    Attributes:
        open_files: Limit of open files.
        ancestor_pids: Process ids of this process and its ancestors.
        same_command_pids: Other processes of the node with the same command.
        nccom: Bus bandwidth of nccom-test in bytes/s, or the reason of its failure; None on the
            ranks that do not run it.
    """

    host: str
    rank: int
    open_files: int
    ancestor_pids: list[int]
    same_command_pids: list[int]
    nccom: float | str | None
    device_report: DeviceReport

    def build_finding(
        self, check: str, measured: float | None, expected: float | None, sentence: str
    ) -> Finding:
        """Return the finding of a failed check about this rank."""
        consequence = CONSEQUENCES[check]
        return Finding(self.host, self.rank, check, measured, expected, sentence, consequence)


def format_first(items: Sequence[str], limit: int = 3, separator: str = ", ") -> str:
    """Join the first items, and count the others: "a, b, c and 2 more"."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return separator.join(items[:limit]) + more


def parse_rank_report(value: dict[str, Any]) -> RankReport:
    """Return the report from the output of `dataclasses.asdict`."""
    device = value["device_report"]
    links = [LinkReport(**link) for link in device["links"]]
    return RankReport(**value | {"device_report": DeviceReport(**device | {"links": links})})


def compute_required_open_files(num_processes: int) -> int:
    """Return the maximum number of files that a process of a run opens.

    Rank 0 has 3 to 6 sockets per process (measured over gloo, 2 to 8 processes), and accelerator
    libraries open their own; the rest is for logs and the corpus.
    """
    return 256 + 8 * num_processes


def check_reports(config: Config, reports: list[RankReport]) -> list[Finding]:
    """Return the failed checks of all ranks, given their reports in rank order."""
    findings = [
        *(finding for report in reports for finding in _check_rank(config, report)),
        *_check_links(config, reports),
        *_check_leftover_processes(reports),
    ]
    hosts = {report.host for report in reports}
    failed_by_all = {
        check
        for check in _RELATIVE_CHECKS
        if len(hosts) > 1 and {one.host for one in findings if one.check == check} == hosts
    }
    return [
        replace(one, consequence=Consequence.warn) if one.check in failed_by_all else one
        for one in findings
    ]


def check_disk_space(
    host: str, directory: str, free_bytes: int, checkpoint_bytes: int, has_checkpoint: bool
) -> list[Finding]:
    """Check for space for the newest checkpoint and the next one during its save."""
    required = checkpoint_bytes * (1 if has_checkpoint else 2)
    if free_bytes >= required:
        return []
    checkpoints = "the next checkpoint takes" if has_checkpoint else "two checkpoints take"
    sentence = (
        f"run.root: {directory} has {format_gib(free_bytes)} GiB free on {host}, and "
        f"{checkpoints} {format_gib(required)}; free some, or set run.root or "
        "checkpoint.destination to a larger disk"
    )
    return [Finding(host, 0, "disk", free_bytes, required, sentence, CONSEQUENCES["disk"])]


def check_clock(
    report: RankReport, bounds: tuple[float, float], max_skew_s: float
) -> list[Finding]:
    """Compare a clock with that of rank 0, given the bounds of the seconds by which it is ahead.

    Only the certain part of the skew counts, since the bounds include the latency of a message.
    """
    least, greatest = bounds
    skew = least if least > 0 else min(greatest, 0.0)
    if abs(skew) <= max_skew_s:
        return []
    sentence = (
        f"the clock of node {report.host} is {skew:+.1f} s off the first node's, more than "
        f"recovery.max_clock_skew_s={max_skew_s:g}; check its time service"
    )
    return [report.build_finding("clock", skew, max_skew_s, sentence)]


def find_faulty_ranks(pairs: Iterable[Sequence[int]]) -> list[int]:
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
    if device.num_wrong:
        sentence = (
            f"{prefix}{device.num_wrong} wrong elements in {device.num_products} matmuls with "
            "known result"
        )
        yield report.build_finding("arithmetic", device.num_wrong, 0, sentence)
    dtype, min_share = config.precision.compute_dtype, config.recovery.min_speed_share
    peak, measured = compute_peak_flops(config.hardware, 1, dtype), device.flops_per_s
    if peak is not None and measured < peak * min_share:
        sentence = (
            f"{prefix}{measured / 1e12:.3g} TFLOP/s in matmuls, less than {min_share:g} of "
            f"hardware.peak_tflops.{dtype.value}={peak / 1e12:g}"
        )
        yield report.build_finding("speed", measured, peak * min_share, sentence)
    rounding = config.precision.rounding
    share, expected = device.rounded_up_share, _ROUNDED_UP_SHARES[rounding]
    if share is not None and abs(share - expected) > _ROUNDED_UP_TOLERANCE:
        sentence = (
            f"{prefix}{device.device} rounds {share:.1%} of casts of 1 + 2^-10 to bf16 up, and "
            f"precision.rounding={rounding.value} rounds {expected:.1%}; set compiler.neuron_sdk, "
            "so that hlat sets NEURON_RT_STOCHASTIC_ROUNDING_EN, and remove the variable elsewhere"
        )
        yield report.build_finding("rounding", share, expected, sentence)
    free, required = device.free_bytes, estimate_memory(config).total
    if free is not None and device.total_bytes is not None and free < required:
        sentence = (
            f"{prefix}{format_gib(free)} of {format_gib(device.total_bytes)} GiB are free on "
            f"{device.device}, and the run takes {format_gib(required)}: another process uses it"
        )
        yield report.build_finding("memory", free, required, sentence)
    limit, num_files = report.open_files, compute_required_open_files(config.num_processes)
    if limit < num_files:
        sentence = (
            f"node {report.host} limits a process to {limit} open files, and a process of this run "
            f"needs {num_files}; raise the hard limit (ulimit -Hn) to at least that"
        )
        yield report.build_finding("open_files", limit, num_files, sentence)
    link = config.hardware.link_gb_per_s
    if isinstance(report.nccom, str):
        sentence = f"nccom-test failed on {report.host}: {report.nccom}"
        yield report.build_finding("nccom", None, None, sentence)
    elif report.nccom is not None and link is not None and report.nccom < min_share * link * 1e9:
        yield _build_link_finding(config, report, "nccom-test's", report.nccom, link * 1e9)


def _check_links(config: Config, reports: list[RankReport]) -> Iterator[Finding]:
    """Check sums and bandwidths of each group of ranks.

    The ranks that explain wrong pairs are faulty, else those with a wrong result. The ranks that
    explain slow pairs are faulty. If all pairs are fast and the axis is slow, no rank can be named
    and every one gets a warning.
    """
    groups = defaultdict[tuple[str, tuple[int, ...]], list[tuple[RankReport, LinkReport]]](list)
    for report in reports:
        for link in report.device_report.links:
            groups[link.axis, tuple(link.ranks)].append((report, link))
    for (axis, ranks), members in groups.items():
        group = f"{axis}={len(ranks)} ranks"
        wrong = find_faulty_ranks(pair for _, link in members for pair in link.wrong_pairs)
        wrong = wrong or [report.rank for report, link in members if link.num_wrong]
        slow = find_faulty_ranks(pair for _, link in members for pair in link.slow_pairs)
        for report, link in members:
            measured, expected = link.bytes_per_s, link.expected_bytes_per_s
            if report.rank in wrong:
                sentence = (
                    f"rank {report.rank}: all-reduce over {group} is wrong where it takes part"
                )
                yield report.build_finding("sum", link.num_wrong, 0, sentence)
            if expected is None:
                continue
            finding = _build_link_finding(config, report, group, measured, expected)
            if report.rank in slow:
                yield finding
            elif not slow and measured < config.recovery.min_speed_share * expected:
                yield replace(finding, consequence=Consequence.warn)


def _build_link_finding(
    config: Config, report: RankReport, group_name: str, measured: float, expected: float
) -> Finding:
    min_share = config.recovery.min_speed_share
    sentence = (
        f"rank {report.rank}: all-reduce over {group_name} reaches {measured / 1e9:.3g} GB/s, less "
        f"than {min_share:g} of the {expected / 1e9:g} GB/s of hardware={config.hardware.name}"
    )
    return report.build_finding("link", measured, min_share * expected, sentence)


def _check_leftover_processes(reports: list[RankReport]) -> Iterator[Finding]:
    """Check for processes with the same command outside this attempt's process trees."""
    related = {(report.host, pid) for report in reports for pid in report.ancestor_pids}
    for report in reports:
        pids = [pid for pid in report.same_command_pids if (report.host, pid) not in related]
        if pids:
            sentence = (
                f"processes {', '.join(map(str, pids))} on {report.host} were left by an earlier "
                "attempt at this run and may still use its devices; kill them"
            )
            yield report.build_finding("left_over", len(pids), 0, sentence)
