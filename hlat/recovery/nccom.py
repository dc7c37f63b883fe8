"""The sums that Neuron's own benchmark, nccom-test, measures on a node.

It is an external program of the Neuron tools. It opens the NeuronCores itself, so it runs before
any process of the run has a device.
"""

import shutil
import subprocess
from dataclasses import dataclass

from hlat.config.hardware import Hardware

_TIMEOUT_S = 300
_BANDWIDTH = "busbw(GB/s)"
"""Column of the table that it prints; its GB are 2^30 bytes (AWS Neuron documentation, NCCOM-TEST
user guide, output description)."""


@dataclass(frozen=True)
class Nccom:
    """What nccom-test said.

    Attributes:
        bytes_per_s: Bus bandwidth of the all-reduce; None: it measured none.
        problem: Why not.
    """

    bytes_per_s: float | None = None
    problem: str | None = None


def wanted(hardware: Hardware) -> bool:
    """Whether this is a Trainium node that has the program."""
    return hardware.name.startswith("trn") and shutil.which("nccom-test") is not None


def measure(hardware: Hardware) -> Nccom:
    """Let all NeuronCores of this node add up 32 MiB, and read what it took."""
    command = [
        "nccom-test",
        "-r",
        str(hardware.processes_per_node),
        "-d",
        "fp32",
        "--check",
        "allr",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Nccom(problem=str(error))
    return parse(done.stdout + done.stderr)


def parse(output: str) -> Nccom:
    """Read the last row of the table, or without one the last line, which says why."""
    lines = [line.split() for line in output.splitlines() if line.strip()]
    headers = [i for i, words in enumerate(lines) if _BANDWIDTH in words]
    if headers:
        columns = lines[headers[-1]]
        for words in reversed(lines[headers[-1] + 1 :]):
            if len(words) == len(columns) and words[1].isdecimal():  # the count of elements
                return Nccom(float(words[columns.index(_BANDWIDTH)]) * 2**30)
    return Nccom(problem=" ".join(lines[-1]) if lines else "it printed nothing")
