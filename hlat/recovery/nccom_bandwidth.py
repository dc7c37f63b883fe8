"""All-reduce bandwidth of a node from nccom-test, the benchmark of the Neuron tools.

nccom-test is an external program that opens the NeuronCores itself, so it runs before any process
of the run has a device.
"""

import shutil
import subprocess

from hlat.config.hardware import HardwareConfig

_TIMEOUT_S = 300
_BANDWIDTH_COLUMN = "busbw(GB/s)"
"""Column of the printed table; its GB are 2^30 bytes (AWS Neuron documentation, NCCOM-TEST user
guide, output description)."""


def is_nccom_test_available(hardware: HardwareConfig) -> bool:
    """Return True on a Trainium node with nccom-test on PATH."""
    return hardware.name.startswith("trn") and shutil.which("nccom-test") is not None


def run_nccom_test(hardware: HardwareConfig) -> float | str:
    """Return the bus bandwidth of an all-reduce of 32 MiB over all NeuronCores of this node.

    Returns bytes/s, or the reason of a failure.
    """
    cores = str(hardware.processes_per_node)
    command = ["nccom-test", "-r", cores, "-d", "fp32", "--check", "allr"]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return parse_nccom_output(completed.stdout + completed.stderr)


def parse_nccom_output(output: str) -> float | str:
    """Return bytes/s from the last row of the table; without a table, the last line."""
    lines = [line.split() for line in output.splitlines() if line.strip()]
    headers = [i for i, fields in enumerate(lines) if _BANDWIDTH_COLUMN in fields]
    if headers:
        columns = lines[headers[-1]]
        for fields in reversed(lines[headers[-1] + 1 :]):
            if len(fields) == len(columns) and fields[1].isdecimal():  # the count of elements
                return float(fields[columns.index(_BANDWIDTH_COLUMN)]) * 2**30
    return " ".join(lines[-1]) if lines else "no output"
