"""Measure restarts: time, size of the state, and equality of the following batches.

Usage: python benchmarks/data/resume.py SCRATCH [--documents 10000 100000 1000000] [--only TEXT]

Each contestant reads `lines` and saves its state after each number of documents, and the batches
that follow. New processes open the loader, restore the state and read the same batches. The results
are the seconds until the first batch, without imports, and whether all are bitwise equal. The same
is measured in the third epoch of `few`. Then `numbered` is read once, with a new process every few
batches, to count lost and repeated documents. Updates resume.json after each contestant.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from count import count_documents
from run import HERE, LIBRARIES, environment

from benchmarks.common import describe_machine, spread

CONTESTANTS = [
    "ours",
    "ours, fast encoder",
    "HLAT, fast tokenizer",
    "HLAT, buffer dropped",
    "torchtitan main, map",
    "torchtitan main, streaming",
    "torchtitan 0.3.0, map",
    "torchtitan 0.3.0, streaming",
    "datasets streaming",
    "mosaicml-streaming",
]
BATCHES = 16
"""Number of batches that are compared after each restart."""
THIRD_EPOCH = 12_500
"""Number of documents of `few` until the middle of the third epoch."""
TIMINGS = 3
BATCHES_BETWEEN_RESTARTS = 7
TIMEOUT_SECONDS = 5400


def call(folder: Path, scratch: Path, **request: Any) -> dict[str, Any]:
    """Run one task of resume_task.py in a new process."""
    request |= {"folder": str(folder), "scratch": str(scratch)}
    command = [sys.executable, str(HERE / "resume_task.py"), json.dumps(request)]
    done = subprocess.run(
        command,
        env=environment(scratch),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure_point(name: str, corpus: str, documents: int, folder: Path, scratch: Path) -> Any:
    """Restart several times from the state after `documents` documents."""
    request = {"name": name, "corpus": corpus, "documents": documents, "batches": BATCHES}
    results = [call(folder, scratch, task="resume", **request) for _ in range(TIMINGS)]
    return {
        "corpus": corpus,
        "documents": documents,
        "seconds": spread([result["seconds"] for result in results]),
        "state_bytes": results[0]["state_bytes"],
        "exact": all(result["exact"] for result in results),
    }


def measure_points(name: str, documents: list[int], folder: Path, scratch: Path) -> dict[str, Any]:
    """Save states in one run per corpus, then restart from each."""
    fresh = [
        call(folder, scratch, task="fresh", name=name, corpus="lines")["seconds"]
        for _ in range(TIMINGS)
    ]
    points = []
    for corpus, counts in (("few", [THIRD_EPOCH]), ("lines", documents)):
        call(
            folder, scratch, task="run", name=name, corpus=corpus, documents=counts, batches=BATCHES
        )
        points += [measure_point(name, corpus, count, folder, scratch) for count in counts]
    return {"fresh_seconds": spread(fresh), "points": points}


def count_losses(name: str, restarts: bool, folder: Path, scratch: Path) -> dict[str, int]:
    """Read `numbered` once, in one process or in consecutive ones, and count its documents."""
    batches = BATCHES_BETWEEN_RESTARTS if restarts else 1000
    parts = []
    processes = 0
    while True:
        request = {"task": "chain", "name": name, "batches": batches, "first": not processes}
        answer = call(folder, scratch, **request)
        processes += 1
        parts.append(np.load(folder / "chain.npy"))
        if answer["ended"]:
            break
    counts = count_documents(np.concatenate(parts), answer["rows_are_streams"], scratch)
    return {"restarts": processes - 1, **counts}


def study(name: str, documents: list[int], folder: Path, scratch: Path) -> dict[str, Any]:
    """Measure one contestant; after a failure, return the results so far and its message."""
    folder.mkdir(parents=True, exist_ok=True)
    row: dict[str, Any] = {"contestant": name}
    try:
        row["losses"] = [count_losses(name, on, folder, scratch) for on in (False, True)]
        row |= measure_points(name, documents, folder, scratch)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        row["failure"] = str(error)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--documents", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--only", default="", help="contestants whose name contains this")
    parser.add_argument("--output", type=Path, default=HERE / "resume.json")
    arguments = parser.parse_args()
    scratch = arguments.scratch.resolve()
    rows = read_rows(arguments.output)
    for number, name in enumerate(CONTESTANTS):
        if arguments.only in name:
            rows[name] = study(name, arguments.documents, scratch / f"resume-{number}", scratch)
            print(json.dumps(rows[name]), flush=True)
            ordered = [rows[contestant] for contestant in CONTESTANTS if contestant in rows]
            result = {"machine": describe_machine(LIBRARIES), "rows": ordered}
            arguments.output.write_text(json.dumps(result, indent=2) + "\n")


def read_rows(path: Path) -> dict[str, Any]:
    """Return the rows of an earlier call by contestant."""
    if not path.exists():
        return {}
    return {row["contestant"]: row for row in json.loads(path.read_text())["rows"]}


if __name__ == "__main__":
    main()
