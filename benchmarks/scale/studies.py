"""Measure processor time and memory of commands for many runs, checkpoints and stages.

Usage: PYTHONPATH=. python benchmarks/scale/studies.py [--only NAME ...] [--max-size N]
           [--limit SECONDS] [--render]
(prints a table, writes studies.json and the table in README.md)

Each operation runs in a separate process at three sizes. Another process writes its inputs before
(study_inputs.py). The metric is the processor time of the process and its children, as it
depends little on other load. With --only or --max-size, the other results in studies.json
remain. A process that exceeds the limit is stopped and has no result.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import describe_machine, machine, table, write_between

HERE = Path(__file__).resolve().parent
RESULT = HERE / "studies.json"
SIZES, STAGES, FILES = (100, 1_000, 10_000), (10, 100, 1_000), (1_000, 10_000, 100_000)
EVALUATIONS = (1_000, 10_000, 30_000)
REPETITIONS, REPEATED_UP_TO_S = 3, 10.0
"""Repetitions of a short process; the result is that with the smallest processor time."""
CHANGING = ("local_log", "local_stopped", "runs_first", "checkpoint_prune")
"""Operations that change their inputs, which are measured once."""
SMALLEST_GROWTH = {"processor_s": 0.5, "peak_mb": 1.0}
"""Growth from the smallest to the second size below which an exponent would be noise."""
LIBRARIES = ["hydra-core", "omegaconf", "orjson", "matplotlib"]


@dataclass(frozen=True)
class Operation:
    """A command that is measured.

    Attributes:
        inputs: Name of the inputs in study_inputs.py; operations in sequence share them.
        arguments: Arguments of Python; {size} and {directory} are replaced.
    """

    title: str
    unit: str
    sizes: tuple[int, ...]
    inputs: str
    arguments: tuple[str, ...]


def command(title: str, unit: str, sizes: tuple[int, ...], inputs: str, *words: str) -> Operation:
    """Return the operation of a command of hlat."""
    return Operation(title, unit, sizes, inputs, ("-m", "hlat", *words))


def function(name: str, title: str, unit: str, sizes: tuple[int, ...], inputs: str) -> Operation:
    """Return the operation of a function of study_operations.py."""
    module = "benchmarks.scale.study_operations"
    return Operation(title, unit, sizes, inputs, ("-m", module, name, "{size}", "{directory}"))


SLURM = ("hydra/launcher=slurm", "hydra.launcher.dry_run=true")
CHECKPOINTS = "{directory}/template"
OPERATIONS = {
    "local_log": function("local_log", "log and console of a local sweep", "points", SIZES, ""),
    "local_stopped": function("local_stopped", "list of stopped points", "points", SIZES, ""),
    "slurm_dry_run": command(
        *("dry run of a sweep on Slurm", "points", SIZES, "", "sweep", *SLURM),
        "run.seed=range(0,{size})",
    ),
    "runs_first": command("`hlat runs` without index", "runs", SIZES, "runs", "runs", "runs"),
    "runs_again": command("`hlat runs` with index", "runs", SIZES, "runs", "runs", "runs"),
    "report": command("`hlat report` of a sweep", "runs", SIZES, "runs", "report", "sweep"),
    "chain_dry_run": command(
        *("dry run of a campaign, chain", "stages", STAGES, "chain"),
        *("campaign", "campaign.yaml", "dry_run=true"),
    ),
    "chain_status": command(
        *("status of a campaign, chain", "stages", STAGES, "chain"),
        *("campaign", "campaign.yaml", "status=true"),
    ),
    "evaluations_dry_run": command(
        *("dry run of a campaign", "evaluations", EVALUATIONS, "evaluations"),
        *("campaign", "campaign.yaml", "dry_run=true"),
    ),
    "evaluations_status": command(
        *("status of a campaign", "evaluations", EVALUATIONS, "evaluations"),
        *("campaign", "campaign.yaml", "status=true"),
    ),
    "checkpoint_ls": command(
        *("`hlat checkpoint ls`", "files", FILES, "checkpoints", "checkpoint", "ls", CHECKPOINTS)
    ),
    "checkpoint_newest": function(
        "checkpoint_newest", "selection of the newest checkpoint", "files", FILES, "checkpoints"
    ),
    "checkpoint_prune": command(
        *("`hlat checkpoint prune`, removing half", "files", FILES, "checkpoints", "checkpoint"),
        *("prune", CHECKPOINTS, "keep_last=1", "keep_every_steps=2", "yes=true"),
    ),
}


def measure(operation: Operation, size: int, directory: Path, limit_s: float) -> dict[str, Any]:
    """Return processor time, time and peak memory of a process and its children."""
    words = [word.format(size=size, directory=directory) for word in operation.arguments]
    start = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, *words],
        cwd=directory,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=(output := (directory / "output.txt").open("wb")),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    output.close()
    while (done := os.wait4(child.pid, os.WNOHANG))[0] == 0:
        if time.perf_counter() > start + limit_s:
            os.killpg(child.pid, signal.SIGKILL)
            os.wait4(child.pid, 0)
            return {"size": size, "limit_s": limit_s}
        time.sleep(0.02)
    _, status, used = done
    if code := os.waitstatus_to_exitcode(status):
        tail = (directory / "output.txt").read_text(errors="replace")[-2000:]
        print(f"{operation.title}, {size} {operation.unit}: exit code {code}\n{tail}")
        return {"size": size, "exit_code": code}
    return {
        "size": size,
        "processor_s": round(used.ru_utime + used.ru_stime, 3),
        "wall_s": round(time.perf_counter() - start, 3),
        "peak_mb": round(used.ru_maxrss * 1024 / 1e6, 1),
        "output_bytes": (directory / "output.txt").stat().st_size,
    }


def measure_repeatedly(name: str, size: int, directory: Path, limit_s: float) -> dict[str, Any]:
    """Return the smallest of several measurements of a short process."""
    results = [measure(OPERATIONS[name], size, directory, limit_s)]
    if name not in CHANGING and results[0].get("processor_s", math.inf) < REPEATED_UP_TO_S:
        for _ in range(REPETITIONS - 1):
            results.append(measure(OPERATIONS[name], size, directory, limit_s))
    return min(results, key=lambda result: float(result.get("processor_s", math.inf)))


def prepare(inputs: str, size: int, directory: Path) -> None:
    """Write the inputs of operations in another process, so that its memory is not measured."""
    words = ["-m", "benchmarks.scale.study_inputs", inputs, str(size), str(directory)]
    subprocess.run([sys.executable, *words], check=True)


def run_all(names: Sequence[str], max_size: int, limit_s: float) -> dict[str, list[dict[str, Any]]]:
    """Measure operations; those with the same inputs use one directory, in order."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    groups: dict[tuple[str, int], list[str]] = {}
    for name in names:
        for size in OPERATIONS[name].sizes:
            if size <= max_size:
                group = OPERATIONS[name].inputs or name
                groups.setdefault((group, size), []).append(name)
    for (_, size), members in groups.items():
        with tempfile.TemporaryDirectory(prefix="hlat-studies-") as temporary:
            directory = Path(temporary)
            if inputs := OPERATIONS[members[0]].inputs:
                prepare(inputs, size, directory)
            for name in members:
                found[name].append(measure_repeatedly(name, size, directory, limit_s))
                print(name, json.dumps(found[name][-1]), flush=True)
    return found


def compute_exponent(rows: Sequence[dict[str, Any]], key: str) -> float | None:
    """Return the exponent of the growth between the two largest sizes; None if it is too small.

    The cost of the smallest size, most of which is the start of the process, is subtracted.
    """
    if len(rows) != 3 or not all(key in row for row in rows):
        return None
    (start, first), (_, small), (_, large) = [(row["size"], row[key]) for row in rows]
    if small - first < SMALLEST_GROWTH[key]:
        return None
    sizes = [row["size"] - start for row in rows[1:]]
    return math.log((large - first) / (small - first)) / math.log(sizes[1] / sizes[0])


def render(result: dict[str, Any]) -> str:
    """Return the table of a result."""
    rows = []
    for name, measured in result["operations"].items():
        operation = OPERATIONS[name]
        for row in measured:
            is_last = row is measured[-1]
            if "limit_s" in row:
                cells = [f"not finished in {row['limit_s']:,.0f} s", "", "", ""]
            elif "exit_code" in row:
                cells = [f"exit code {row['exit_code']}", "", "", ""]
            else:
                exponents = [compute_exponent(measured, k) for k in ("processor_s", "peak_mb")]
                shown = ["" if e is None or not is_last else f"{e:.2f}" for e in exponents]
                cells = [f"{row['processor_s']:,.2f}", shown[0]]
                cells += [f"{row['peak_mb']:,.0f}", shown[1]]
            rows.append([operation.title, f"{row['size']:,} {operation.unit}", *cells])
    header = ["operation", "size", "processor time in s", "exponent", "peak memory in MB"]
    return f"{table([*header, 'exponent'], rows)}\n\n{machine(result)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=OPERATIONS, default=[*OPERATIONS])
    parser.add_argument("--max-size", type=int, default=max(FILES))
    parser.add_argument("--limit", type=float, default=900.0, metavar="SECONDS")
    parser.add_argument("--render", action="store_true", help="only write the table again")
    options = parser.parse_args()
    earlier = json.loads(RESULT.read_text()) if RESULT.exists() else {"operations": {}}
    if not options.render:
        found = run_all(options.only, options.max_size, options.limit)
        merged = earlier["operations"]
        for name, rows in found.items():
            by_size = {row["size"]: row for row in [*merged.get(name, []), *rows]}
            merged[name] = [by_size[size] for size in sorted(by_size)]
        ordered = {name: merged[name] for name in OPERATIONS if name in merged}
        earlier = {"machine": describe_machine(LIBRARIES), "operations": ordered}
        RESULT.write_text(json.dumps(earlier, indent=1) + "\n")
    write_between(HERE / "README.md", "studies", render(earlier))
    print(render(earlier))


if __name__ == "__main__":
    main()
