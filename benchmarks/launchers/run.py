"""Submit 200 points to Slurm with hlat and with hydra-submitit-launcher.

    python -m benchmarks.launchers.run PYTHON [REPETITIONS]

PYTHON is the interpreter of an environment with hydra-submitit-launcher. The script starts a Slurm
(tests/slurm/cluster.py) and submits jobs on hold, so that they do not use the processor. A
submission ends when squeue lists 200 tasks. hydra-submitit-launcher waits for its jobs, so the
script kills it then. Its application has three settings and no training; hlat.train has all its
settings. The script then runs four points with hydra-submitit-launcher, of which one raises an
exception and one is killed. It writes result.json and the table in README.md.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import describe_machine, machine, spread, table, write_between
from tests.slurm.cluster import Cluster

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
NUM_POINTS = 200
NAMES = {"hlat": "hlat", "submitit": "hydra-submitit-launcher"}


def count_tasks(cluster: Cluster) -> int:
    """Return the number of tasks in the queue."""
    return len(cluster.run("squeue", "--noheader", "--array", "--format=%i").splitlines())


def measure(cluster: Cluster, folder: Path, command: list[str]) -> dict[str, float]:
    """Submit 200 points on hold; return seconds, requests, files and bytes."""
    folder.mkdir()
    (folder / "bin").mkdir()
    script = f'#!/bin/sh\necho >> {folder}/requests\nexec {shutil.which("sbatch")} "$@"\n'
    (folder / "bin/sbatch").write_text(script)
    (folder / "bin/sbatch").chmod(0o755)
    environment = cluster.environment | {"PYTHONPATH": str(REPOSITORY)}
    environment["PATH"] = f"{folder}/bin:{environment['PATH']}"
    start = time.perf_counter()
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        deadline = start + 300
        while count_tasks(cluster) < NUM_POINTS and time.perf_counter() < deadline:
            time.sleep(0.2)
        wall = time.perf_counter() - start
        if "hydra/launcher=submitit_slurm" in command:
            time.sleep(2)
            process.kill()
        _, _, used = os.wait4(process.pid, 0)
        process.returncode = 0  # it has been waited for
    assert count_tasks(cluster) == NUM_POINTS, (folder / "output").read_text()
    files = [file for file in folder.rglob("*") if file.is_file() and file.parent != folder]
    files = [file for file in files if file.parent.name != "bin"]
    cluster.run("scancel", "--user", str(os.getuid()))
    cluster.wait_until(120, "the queue is empty", lambda: count_tasks(cluster) == 0)
    return {
        "cpu_s": used.ru_utime + used.ru_stime,
        "wall_s": wall,
        "requests": len((folder / "requests").read_text()),
        "files": len(files),
        "megabytes": sum(file.stat().st_size for file in files) / 1e6,
    }


def observe_failures(cluster: Cluster, folder: Path, python: str) -> dict[str, Any]:
    """Run four points with hydra-submitit-launcher; return exit code and states."""
    folder.mkdir()
    command = [python, str(HERE / "peer_app.py"), "-m", "hydra/launcher=submitit_slurm"]
    command += ["+point=0,1,2,3", "+fail=true", "hydra.launcher.timeout_min=5"]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=cluster.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output, _ = process.communicate(timeout=90)
        code = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        output, code = process.communicate()[0], None
    shown = cluster.run("squeue", "--noheader", "--states=all", "--array", "--format=%i %T")
    states = {line.split()[0].partition("_")[2]: line.split()[1] for line in shown.splitlines()}
    return {
        "exit_code": code,
        "states": [states.get(str(point), "") for point in range(4)],
        "last_line": output.decode().strip().splitlines()[-1][:200],
    }


def render(result: dict[str, Any]) -> str:
    """Return the table of the documentation."""
    rows = []
    for key, label in (
        ("cpu_s", "processor time of the submission, s"),
        ("wall_s", "time until all tasks are in the queue, s"),
        ("requests", "calls of sbatch"),
        ("files", "files"),
        ("megabytes", "MB"),
    ):
        cells = [result["submission"][name][key] for name in NAMES]
        shown = [
            f"{cell['median']:g}"
            if cell["min"] == cell["max"]
            else f"{cell['median']:g} ({cell['min']:g} to {cell['max']:g})"
            for cell in cells
        ]
        rows.append([label, *shown])
    head = f"200 points, median and range of {result['repetitions']} submissions"
    return f"{table([head, *NAMES.values()], rows)}\n\n{machine(result)}"


def main(python: str, repetitions: int) -> None:
    """Measure, and write result.json and the table."""
    values = ",".join(f"{(point + 1) * 1e-5:g}" for point in range(NUM_POINTS))
    commands = {
        "hlat": [
            *(sys.executable, "-m", "hlat.train", "-m", "hydra/launcher=slurm"),
            *(f"optimizer.lr={values}", "+hydra.launcher.options.hold=true"),
        ],
        "submitit": [
            *(python, str(HERE / "peer_app.py"), "-m", "hydra/launcher=submitit_slurm"),
            *(f"+point={','.join(map(str, range(NUM_POINTS)))}", "+fail=false"),
            *("+hydra.launcher.additional_parameters.hold=true", "hydra.launcher.timeout_min=5"),
        ],
    }
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "cluster").mkdir()
        with Cluster(folder / "cluster", num_train=2, num_background=1) as cluster:
            for i in range(repetitions + 1):
                for name, command in commands.items():
                    found = measure(cluster, folder / f"{name}{i}", command)
                    print(name, found, flush=True)
                    if i > 0:  # the first is the warm-up
                        measured[name].append(found)
            failures = observe_failures(cluster, folder / "failures", python)
    result = {
        "machine": describe_machine(["hydra-core", "submitit"]),
        "repetitions": repetitions,
        "raw": measured,
        "submission": {
            name: {key: spread([row[key] for row in rows]) for key in rows[0]}
            for name, rows in measured.items()
        },
        "submitit_failures": failures,
    }
    print(failures)
    (HERE / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    write_between(HERE / "README.md", "launchers", render(result))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3)
