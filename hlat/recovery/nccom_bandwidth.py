"""All-reduce bandwidth of a node from nccom-test, the benchmark of the Neuron tools.

nccom-test is an external program that opens the NeuronCores itself, so it runs before any process
of the run has a device.
"""

import shutil
import subprocess
from dataclasses import dataclass

from hlat.config.hardware import HardwareConfig

_TIMEOUT_S = 300
_BANDWIDTH_COLUMN = "busbw(GB/s)"
"""Column of the printed table; its GB are 2^30 bytes (AWS Neuron documentation, NCCOM-TEST user
guide, output description)."""


@dataclass(frozen=True)
class NccomResult:
    """Result of nccom-test.

    Attributes:
        bytes_per_s: Bus bandwidth of the all-reduce; None if the measurement failed.
        problem: Reason of the failure.
    """

    bytes_per_s: float | None = None
    problem: str | None = None


def is_nccom_test_available(hardware: HardwareConfig) -> bool:
    """Return True on a Trainium node with nccom-test on PATH."""
    return hardware.name.startswith("trn") and shutil.which("nccom-test") is not None


def run_nccom_test(hardware: HardwareConfig) -> NccomResult:
    """Run an all-reduce of 32 MiB over all NeuronCores of this node."""
    cores = str(hardware.processes_per_node)
    command = ["nccom-test", "-r", cores, "-d", "fp32", "--check", "allr"]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return NccomResult(problem=str(error))
    return parse_nccom_output(completed.stdout + completed.stderr)


def parse_nccom_output(output: str) -> NccomResult:
    """Parse the last row of the table; without a table, the last line is the problem."""
    lines = [line.split() for line in output.splitlines() if line.strip()]
    headers = [i for i, fields in enumerate(lines) if _BANDWIDTH_COLUMN in fields]
    if headers:
        columns = lines[headers[-1]]
        for fields in reversed(lines[headers[-1] + 1 :]):
            if len(fields) == len(columns) and fields[1].isdecimal():  # the count of elements
                return NccomResult(float(fields[columns.index(_BANDWIDTH_COLUMN)]) * 2**30)
    return NccomResult(problem=" ".join(lines[-1]) if lines else "no output")
