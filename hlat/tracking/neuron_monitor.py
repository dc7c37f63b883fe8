"""Hardware counters from neuron-monitor (Neuron SDK) for rows of metrics.jsonl.

neuron-monitor prints reports on all NeuronCores of a host as JSON lines. A thread reads them, so
`get_latest` returns immediately. If the program is missing, fails, hangs or prints anything else,
rows lack these metrics. Format: AWS Neuron documentation,
tools/neuron-sys-tools/neuron-monitor-user-guide.
"""

import json
import math
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

PROGRAM = "neuron-monitor"
_TERMINATE_TIMEOUT_S = 2.0


class NeuronMonitor:
    """Reader of neuron-monitor's reports; without the program, all reports are empty."""

    def __init__(self) -> None:
        self._latest: dict[str, float] = {}
        self._process: subprocess.Popen[bytes] | None = None
        program = shutil.which(PROGRAM)
        if program is None:
            return
        with suppress(OSError):
            self._process = subprocess.Popen(
                [program],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            threading.Thread(
                target=self._read_reports, name="hlat-neuron-monitor", daemon=True
            ).start()

    def get_latest(self) -> dict[str, float]:
        """Return the metrics of the latest report; empty before the first."""
        return self._latest

    def close(self) -> None:
        """Terminate the program."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_TERMINATE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._latest = {}

    def _read_reports(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with suppress(RecursionError, ValueError):
                    self._latest = parse_report(json.loads(line))
        self._latest = {}  # the program has exited: its last report is outdated


def parse_report(report: Any) -> dict[str, float]:
    """Return the metrics of a report, over all processes of the host.

    Returns:
        `neuroncore_utilization`, the mean over the cores in use, in percent;
        `neuron_device_bytes` and `neuron_host_bytes` of all processes; `neuron_execution_errors`
        during the report's period; `neuron_ecc_uncorrected`, uncorrected memory errors. Metrics
        that the report lacks are omitted.
    """
    runtimes = [
        _get_nested(runtime, "report") for runtime in _iterate_list(report, "neuron_runtime_data")
    ]
    cores = [_get_nested(one, "neuroncore_counters", "neuroncores_in_use") for one in runtimes]
    utilization = [
        percentage
        for in_use in cores
        for core in (in_use.values() if isinstance(in_use, dict) else ())
        for percentage in _iterate_finite(core, "neuroncore_utilization")
    ]
    memory = [_get_nested(one, "memory_used", "neuron_runtime_used_bytes") for one in runtimes]
    errors = [_get_nested(one, "execution_stats", "error_summary") for one in runtimes]
    devices = _iterate_list(
        _get_nested(report, "system_data", "neuron_hw_counters"), "neuron_devices"
    )
    sums = {
        "neuron_device_bytes": [n for one in memory for n in _iterate_finite(one, "neuron_device")],
        "neuron_host_bytes": [n for one in memory for n in _iterate_finite(one, "host")],
        "neuron_execution_errors": [
            n
            for one in errors
            if isinstance(one, dict)
            for key in one
            for n in _iterate_finite(one, key)
        ],
        "neuron_ecc_uncorrected": [
            n
            for device in devices
            for key in ("mem_ecc_uncorrected", "sram_ecc_uncorrected")
            for n in _iterate_finite(device, key)
        ],
    }
    mean = math.fsum(utilization) / len(utilization) if utilization else None
    return ({} if mean is None else {"neuroncore_utilization": mean}) | {
        name: math.fsum(values) for name, values in sums.items() if values
    }


def _get_nested(tree: Any, *keys: str) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _iterate_list(tree: Any, key: str) -> Iterator[Any]:
    values = _get_nested(tree, key)
    yield from values if isinstance(values, list) else ()


def _iterate_finite(tree: Any, key: str) -> Iterator[float]:
    value = _get_nested(tree, key)
    if isinstance(value, int | float) and math.isfinite(value):
        yield float(value)
