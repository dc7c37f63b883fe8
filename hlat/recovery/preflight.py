"""Pre-flight: checks of every node before the first step.

A faulty device or a slow link costs a run days, and a check of a minute at the start detects it.
All ranks measure, rank 0 evaluates, and all ranks stop or continue together.
"""

import math
import shutil
import sys
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hlat.checkpoint import checkpoint_directory
from hlat.config.config_errors import ConfigError, ExitCode, MissingDeviceError, raise_config_errors
from hlat.config.engine import EngineBackend
from hlat.config.hardware import HardwareConfig
from hlat.config.run import Config
from hlat.config.run_steps import compute_total_steps
from hlat.distributed import rank_environment
from hlat.distributed.object_group import ObjectGroup, broadcast_object
from hlat.engine import graph_extraction
from hlat.engine.interface import DeviceReport, Engine
from hlat.model.decoder_spec import compute_flops_per_token
from hlat.plan.memory_estimate import compute_checkpoint_bytes
from hlat.recovery import host_info, nccom_bandwidth, preflight_checks, process_ids
from hlat.recovery.preflight_checks import (
    CONSEQUENCES,
    Consequence,
    Finding,
    RankReport,
    format_first,
    parse_rank_report,
)
from hlat.tracking.tracker import Tracker

_NUM_CLOCK_ROUNDS = 3
_SLOW_STEP_S = 10.0
"""Least time of a step, in seconds, for which a run prints a warning."""


def run_preflight(config: Config, run_dir: Path, engine: Engine) -> bool:
    """Check all nodes; return True if all are healthy, else report them and close the engine.

    The engine joins its process groups here.

    Raises:
        ConfigError: A check failed that would fail on every other node as well.
        SystemExit: This process has no device and cannot take part in collectives.
    """
    if not config.recovery.preflight:
        return True
    if graph_extraction.is_extracting_graphs():
        engine.run_device_checks(config)  # its results are meaningless
        return True
    start = time.perf_counter()
    report = _measure_rank(config, run_dir, engine)
    group = engine.parallel_state.world_group
    bounds = measure_clock_bounds(group)
    reports = [parse_rank_report(item) for item in group.gather_object(asdict(report))]
    result = None
    if group.is_rank0:
        max_skew_s = config.recovery.max_clock_skew_s
        failed = preflight_checks.check_reports(config, reports)
        for item in zip(reports, bounds, strict=True):
            failed += preflight_checks.check_clock(*item, max_skew_s)
        failed += _check_disk(config, run_dir, report.host)
        result = _record_results(config, run_dir, reports, failed, time.perf_counter() - start)
    problems, healthy = broadcast_object(group, result)
    raise_config_errors(problems)
    if not healthy:
        engine.close()
    return bool(healthy)


def measure_clock_bounds(world_group: ObjectGroup) -> list[tuple[float, float]]:
    """Return, on rank 0, the minimum and maximum seconds by which each rank's clock is ahead.

    A rank reads its clock between the broadcast and the gather of rank 0, which bounds the
    difference; several rounds tighten the bounds.
    """
    rounds = []
    for _ in range(_NUM_CLOCK_ROUNDS):
        start = time.time()
        broadcast_object(world_group, None)
        clocks = world_group.gather_object(time.time())
        end = time.time()
        rounds.append([(clock - end, clock - start) for clock in clocks])
    return [
        (max(least for least, _ in bounds), min(greatest for _, greatest in bounds))
        for bounds in zip(*rounds, strict=True)
    ]


def _measure_rank(config: Config, run_dir: Path, engine: Engine) -> RankReport:
    """Measure this process's node and device."""
    is_local_rank0 = rank_environment.read_rank_info().local_rank == 0
    nccom = None
    if is_local_rank0 and nccom_bandwidth.is_nccom_test_available(config.hardware):
        nccom = nccom_bandwidth.run_nccom_test(config.hardware)
    num_files = preflight_checks.compute_required_open_files(config.num_processes)
    device_report = _run_device_checks(config, run_dir, engine)
    return RankReport(
        host=host_info.get_host_name(),
        rank=engine.parallel_state.rank,
        open_files=host_info.raise_open_file_limit(num_files),
        ancestor_pids=process_ids.list_ancestor_pids(),
        same_command_pids=process_ids.list_same_command_pids() if is_local_rank0 else [],
        nccom=nccom,
        device_report=device_report,
    )


def _run_device_checks(config: Config, run_dir: Path, engine: Engine) -> DeviceReport:
    """Run the engine's device checks; exit if a device that `hardware` specifies is missing."""
    hardware, rank_info = config.hardware, rank_environment.read_rank_info()
    try:
        report = engine.run_device_checks(config)
    except MissingDeviceError as error:
        if hardware.processes_per_node is None:
            raise
        host, rank = host_info.get_host_name(), rank_info.rank
        consequence = CONSEQUENCES["devices"]
        finding = Finding(host, rank, "devices", None, None, str(error), consequence)
        report_unhealthy_nodes(Tracker(run_dir, config), [finding])
        raise SystemExit(ExitCode.UNHEALTHY_NODE) from error
    if needs_accelerator(config) and report.device == "cpu" and rank_info.world_size == 1:
        raise build_missing_device_error(hardware, 0)
    return report


def needs_accelerator(config: Config) -> bool:
    """Return True if the run must not fall back to the CPU."""
    hardware, engine = config.hardware, config.engine
    has_accelerators = hardware.processes_per_node is not None and hardware.name != "cpu"
    return has_accelerators and engine.name is EngineBackend.native and engine.device == "auto"


def build_missing_device_error(hardware: HardwareConfig, num_found: int) -> ConfigError:
    """Return the error for a machine with fewer accelerators than its hardware should have."""
    device = "NeuronCore" if hardware.name.startswith("trn") else "GPU"
    plural = "" if hardware.processes_per_node == 1 else "s"
    return ConfigError(
        f"hardware={hardware.name} has {hardware.processes_per_node} {device}{plural} per node, "
        f"and torch finds {num_found or 'none'} on this machine; start the run on such a node, use "
        "hardware=cpu, or set engine.device=cpu to run its processes on the CPU"
    )


def _check_disk(config: Config, run_dir: Path, host: str) -> list[Finding]:
    """Check the disk space for checkpoints, if they are written to a disk."""
    root = checkpoint_directory.build_checkpoint_root(run_dir, config.checkpoint.destination)
    if not isinstance(root, Path):
        return []
    has_checkpoint = any((root / "checkpoints").glob("step_*"))
    free, required = shutil.disk_usage(root).free, compute_checkpoint_bytes(config)
    return preflight_checks.check_disk_space(host, str(root), free, required, has_checkpoint)


def _record_results(
    config: Config, run_dir: Path, reports: list[RankReport], failed: list[Finding], seconds: float
) -> tuple[list[str], bool]:
    """Log the results; return configuration problems and True if all nodes are healthy."""
    tracker = Tracker(run_dir, config)
    sentences = {
        consequence: dict.fromkeys(one.sentence for one in failed if one.consequence is consequence)
        for consequence in Consequence
    }
    for warning in sentences[Consequence.warn]:
        tracker.print_message(f"WARNING: {warning}")
    tracker.log_event(
        "preflight",
        0,
        seconds=round(seconds, 3),
        nodes=_summarize_nodes(reports),
        failed=[asdict(finding) | {"consequence": finding.consequence.value} for finding in failed],
    )
    speeds = [one.device_report.flops_per_s for one in reports if one.device_report.device == "cpu"]
    if speeds and (notice := _format_slow_steps(config, min(speeds))):
        tracker.print_message(notice)
    unhealthy = [one for one in failed if one.consequence is Consequence.exclude]
    report_unhealthy_nodes(tracker, unhealthy)
    return [*sentences[Consequence.refuse]], not unhealthy


def _format_slow_steps(config: Config, flops_per_s: float) -> str:
    """Return a warning with the least time of a step on a CPU; empty if it is short."""
    tokens = config.batch.tokens_per_step
    flops = compute_flops_per_token(config.model, config.batch.sequence_length)
    seconds = flops * tokens / config.num_processes / flops_per_s
    if seconds < _SLOW_STEP_S:
        return ""
    return (
        f"WARNING: a step of {tokens:,} tokens takes at least {seconds:,.0f} s at the "
        f"{flops_per_s / 1e9:,.0f} GFLOP/s of this CPU, and the run has "
        f"{compute_total_steps(config):,} steps; use a smaller model, a smaller "
        f"batch.global_batch_size than {config.batch.global_batch_size}, or another device"
    )


def report_unhealthy_nodes(tracker: Tracker, findings: list[Finding], step: int = 0) -> None:
    """Log an event and print a line for each unhealthy node."""
    by_host = defaultdict(list)
    for finding in findings:
        by_host[finding.host].append(finding)
    for host, failures in by_host.items():
        reasons = [finding.sentence for finding in failures]
        ranks = sorted({finding.rank for finding in failures})
        tracker.log_event("exclude", step, host=host, ranks=ranks, reasons=reasons)
        message = f"node {host} is unhealthy: {format_first(reasons, separator='; ')}"
        print(f"hlat: {message}; exclude it and start the same command again", file=sys.stderr)


def _summarize_nodes(reports: list[RankReport]) -> dict[str, dict[str, Any]]:
    """Return for each node the device and the minimum speeds of its processes."""
    nodes: dict[str, dict[str, Any]] = {}
    for report in reports:
        device = report.device_report
        new_node = {"device": device.device, "flops_per_s": math.inf, "bytes_per_s": {}}
        node = nodes.setdefault(report.host, new_node)
        node["flops_per_s"] = min(node["flops_per_s"], device.flops_per_s)
        bandwidths = [(link.axis, link.bytes_per_s) for link in device.links]
        if isinstance(report.nccom, float):
            bandwidths.append(("nccom", report.nccom))
        for axis, bandwidth in bandwidths:
            slowest = node["bytes_per_s"].get(axis, bandwidth)
            node["bytes_per_s"][axis] = min(slowest, bandwidth)
    return nodes
