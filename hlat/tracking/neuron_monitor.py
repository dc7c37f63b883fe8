"""Hardware counters from neuron-monitor (Neuron SDK) for rows of metrics.jsonl.

neuron-monitor prints reports on all NeuronCores of a host as JSON lines. A thread reads them, so
`get_latest` returns immediately. If the program is missing, fails, hangs or prints anything else,
rows lack these metrics. Format: AWS Neuron documentation,
tools/neuron-sys-tools/neuron-monitor-user-guide.
"""

import json
import math
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from hlat.tracking.row_validation import is_finite_number

PROGRAM = "neuron-monitor"
_TERMINATE_TIMEOUT_S = 2.0
_RUNTIME = r"/neuron_runtime_data/\d+/report"
_DEVICE = r"/system_data/neuron_hw_counters/neuron_devices/\d+"
_PATHS = {
    "neuroncore_utilization": rf"{_RUNTIME}/neuroncore_counters/neuroncores_in_use/[^/]+/"
    "neuroncore_utilization",
    "neuron_device_bytes": rf"{_RUNTIME}/memory_used/neuron_runtime_used_bytes/neuron_device",
    "neuron_host_bytes": rf"{_RUNTIME}/memory_used/neuron_runtime_used_bytes/host",
    "neuron_execution_errors": rf"{_RUNTIME}/execution_stats/error_summary/[^/]+",
    "neuron_ecc_uncorrected": rf"{_DEVICE}/(mem|sram)_ecc_uncorrected",
}
"""Regular expression of each metric's path in a report."""


class NeuronMonitor:
    """Reader of neuron-monitor's reports; without the program, all reports are empty."""

    def __init__(self) -> None:
        self._latest: dict[str, float] = {}
        self._process: subprocess.Popen[bytes] | None = None
        program = shutil.which(PROGRAM)
        if program is None:
            return
        with suppress(OSError):
            null = subprocess.DEVNULL
            self._process = subprocess.Popen(
                [program], stdin=null, stdout=subprocess.PIPE, stderr=null
            )
            threading.Thread(target=self._read_reports, args=[self._process], daemon=True).start()

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

    def _read_reports(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None
        with process.stdout as lines:
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
    values: dict[str, list[float]] = {}
    for path, value in _iterate_finite(report, ""):
        for metric, pattern in _PATHS.items():
            if re.fullmatch(pattern, path):
                values.setdefault(metric, []).append(value)
    metrics = {metric: math.fsum(numbers) for metric, numbers in values.items()}
    if cores := values.get("neuroncore_utilization"):
        metrics["neuroncore_utilization"] /= len(cores)
    return metrics


def _iterate_finite(tree: Any, path: str) -> Iterator[tuple[str, float]]:
    """Yield the path and value of each finite number in a report."""
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _iterate_finite(value, f"{path}/{key}")
    elif is_finite_number(tree):
        yield path, float(tree)
