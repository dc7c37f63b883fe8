"""The counters of neuron-monitor, which comes with the Neuron SDK, for rows of metrics.jsonl.

The program tells of all NeuronCores of its machine as lines of JSON. A thread reads them, so a row
takes the newest without waiting; where the program is not installed, fails, hangs or says something
else, rows lack these numbers and nothing else happens. The format: AWS Neuron documentation,
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
_SECONDS_TO_END = 2.0


class NeuronMonitor:
    """Hears the program until it is closed; hears nothing where there is none."""

    def __init__(self) -> None:
        self._newest: dict[str, float] = {}
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
            threading.Thread(target=self._listen, name="hlat-neuron-monitor", daemon=True).start()

    def newest(self) -> dict[str, float]:
        """Return the numbers of the newest report; none before the first."""
        return self._newest

    def close(self) -> None:
        """End the program."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._newest = {}

    def _listen(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with suppress(RecursionError, ValueError):
                    self._newest = numbers(json.loads(line))
        self._newest = {}  # it has ended: what it said last is no longer so


def numbers(report: Any) -> dict[str, float]:
    """Return what a report tells of the machine, all processes together.

    Returns:
        `neuroncore_utilization`, the mean over the cores in use, in percent;
        `neuron_device_bytes` and `neuron_host_bytes` of all processes; `neuron_execution_errors` in
        the program's period; `neuron_ecc_uncorrected`, errors of memory that no hardware could
        mend. Those that the report lacks are left out.
    """
    runtimes = [*_each(report, "neuron_runtime_data")]
    reports = [_in(runtime, "report") for runtime in runtimes]
    cores = [_in(one, "neuroncore_counters", "neuroncores_in_use") for one in reports]
    shares = [
        share
        for in_use in cores
        for core in (in_use.values() if isinstance(in_use, dict) else ())
        for share in _known(core, "neuroncore_utilization")
    ]
    used = [_in(one, "memory_used", "neuron_runtime_used_bytes") for one in reports]
    failed = [_in(one, "execution_stats", "error_summary") for one in reports]
    devices = [*_each(_in(report, "system_data", "neuron_hw_counters"), "neuron_devices")]
    sums = {
        "neuron_device_bytes": [n for one in used for n in _known(one, "neuron_device")],
        "neuron_host_bytes": [n for one in used for n in _known(one, "host")],
        "neuron_execution_errors": [
            n for one in failed if isinstance(one, dict) for key in one for n in _known(one, key)
        ],
        "neuron_ecc_uncorrected": [
            n
            for device in devices
            for key in ("mem_ecc_uncorrected", "sram_ecc_uncorrected")
            for n in _known(device, key)
        ],
    }
    mean = {"neuroncore_utilization": math.fsum(shares) / len(shares)} if shares else {}
    return mean | {name: math.fsum(values) for name, values in sums.items() if values}


def _in(tree: Any, *keys: str) -> Any:
    """What lies at a path; None if nothing does."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _each(tree: Any, key: str) -> Iterator[Any]:
    found = _in(tree, key)
    yield from found if isinstance(found, list) else ()


def _known(tree: Any, key: str) -> Iterator[float]:
    value = _in(tree, key)
    if isinstance(value, int | float) and math.isfinite(value):
        yield float(value)
