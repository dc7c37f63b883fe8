"""Measure the time of `python -m hlat.train --cfg job` relative to an empty Hydra program.

Usage: python benchmarks/compose/run.py     (prints a table, writes result.json)
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPETITIONS = 15
EMPTY_PROGRAM = """
import hydra

@hydra.main(version_base="1.3", config_path=None)
def main(config):
    pass

main()
"""


def measure(command: list[str], folder: str) -> float:
    """Return the seconds of a command, with the bytecode that an earlier one has written."""
    environment = os.environ | {
        "PYTHONPATH": str(HERE.parent.parent),
        "PYTHONPYCACHEPREFIX": str(Path(folder) / "bytecode"),
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "empty.py"
        program.write_text(EMPTY_PROGRAM)
        train = [sys.executable, "-m", "hlat.train"]
        contestants = {
            "an empty Hydra program --cfg job": [sys.executable, str(program), "--cfg", "job"],
            "hlat.train --cfg job": [*train, "--cfg", "job"],
            "hlat.train model=70b precision=mixed --cfg job": [
                *train,
                "model=70b",
                "precision=mixed",
                "--cfg",
                "job",
            ],
            "hlat.train experiment=hlat_70b_upsample --cfg job": [
                *train,
                "experiment=hlat_70b_upsample",
                "--cfg",
                "job",
            ],
            "hlat.train --help": [*train, "--help"],
        }
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        for repetition in range(REPETITIONS + 1):
            for name, command in contestants.items():
                elapsed = measure(command, folder)
                if repetition:  # the first round writes bytecode and warms the file cache
                    seconds[name].append(elapsed)
    peer = seconds["an empty Hydra program --cfg job"]
    result = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "hydra-core": metadata.version("hydra-core"),
        "omegaconf": metadata.version("omegaconf"),
        "seconds": {
            name: {
                "median": round(statistics.median(values), 4),
                "min": round(min(values), 4),
                "max": round(max(values), 4),
                "ratio_to_empty_program": round(
                    statistics.median(one / other for one, other in zip(values, peer, strict=True)),
                    3,
                ),
            }
            for name, values in seconds.items()
        },
    }
    (HERE / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    for name, row in result["seconds"].items():
        spread = f"({row['min']:.3f} to {row['max']:.3f})"
        ratio = f"x{row['ratio_to_empty_program']:.2f}"
        print(f"{name:52} median {row['median']:.3f} s  {spread}  {ratio}")


if __name__ == "__main__":
    main()
