"""Time `hlat runs` on generated runs, with a new and with an existing index.

Usage: python benchmarks/run_index/run.py [--runs 10000]   (writes run.json and prints it)

Runs are copies of one small run with other names, seeds and learning rates, below a temporary root.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from omegaconf import OmegaConf

from hlat.config.compose import compose_config

HERE = Path(__file__).resolve().parent


def write_runs(root: Path, count: int) -> None:
    """Write finished runs with 50 logged steps."""
    config = OmegaConf.to_yaml(compose_config(["run.name=NAME", "run.seed=4242"]))
    rows = [
        {
            "step": step,
            "tokens": 512 * step,
            "loss": 8.0 / step,
            "grad_norm": 1.0,
            "tokens_per_second": 100.0,
            "mfu": 0.2,
            "time": 1e9 + step,
            "step_seconds": 1.0,
        }
        for step in range(1, 51)
    ]
    metrics = "".join(json.dumps(row) + "\n" for row in rows)
    for number in range(count):
        run_dir = root / f"tiny-{number:08x}"
        run_dir.mkdir()
        bits = {"mean": 2 + number / count}
        events = [
            {"event": "start", "step": 0, "attempt": 1, "time": 1e9, "began": 1e9},
            {"event": "evaluate", "step": 50, "attempt": 1, "time": 1e9, "bits_per_byte": bits},
            {"event": "finish", "step": 50, "attempt": 1, "time": 1e9 + 60},
        ]
        (run_dir / "metrics.jsonl").write_text(metrics)
        (run_dir / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
        text = config.replace("NAME", run_dir.name).replace("4242", str(number % 5))
        (run_dir / "config.yaml").write_text(text)
        (run_dir / "provenance.json").write_text(json.dumps({"git_revision": "0" * 40}))


def measure(root: Path, *arguments: str) -> dict[str, float]:
    """Return wall time and CPU time of the command, as a user starts it, in seconds."""
    command = [sys.executable, "-m", "hlat", "runs", str(root), *arguments]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall": round(wall, 3), "cpu": round(cpu, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10_000)
    count = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write_runs(root, count)
        result = {
            "runs": count,
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "python": platform.python_version(),
            "first": measure(root),
            "list": [measure(root) for _ in range(5)],
            "filter": [measure(root, "where=config.run.seed=3 and step>=50") for _ in range(3)],
            "group": [measure(root, "group=config.run.seed") for _ in range(3)],
            "export": [measure(root, f"export={root}/runs.parquet") for _ in range(3)],
            "index_bytes": (root / ".hlat_runs.sqlite").stat().st_size,
        }
    (HERE / "run.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
