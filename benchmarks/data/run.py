"""Measure the throughput of data loaders: ours and those of other projects.

Usage: python benchmarks/data/run.py SCRATCH [--rounds 5] [--seconds 10] [--only TEXT ...]

Each measurement has a separate process (measure.py). The contestants alternate, so that other load
of the machine affects all of them. An additional first round starts with empty caches; only its
time to the first batch is used. Writes result.json, or replaces rows of it. SCRATCH is the output
of corpus.py.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import describe_machine, spread

HERE = Path(__file__).resolve().parent
LIBRARIES = [
    "tokenizers",
    "gigatoken",
    "transformers",
    "sentencepiece",
    "datasets",
    "torch",
    "torchdata",
    "grain",
    "mosaicml-streaming",
    "pyarrow",
    "numpy",
]
"""Packages with versions in the result."""
PEERS = [
    "torchtitan main, map",
    "torchtitan main, streaming",
    "torchtitan 0.3.0, map",
    "torchtitan 0.3.0, streaming",
    "datasets streaming",
    "datasets streaming, not resumable",
    "mosaicml-streaming",
]
OURS = ["ours", "ours, fast encoder"]
ENCODERS = ["reference encoder alone", "fast encoder alone"]
WITH_WORKERS = ["torchtitan 0.3.0, streaming", "datasets streaming", "mosaicml-streaming"]
"""Peers that distribute the corpus to workers."""
Entry = tuple[str, str, int, str]
KEYS = ("contestant", "tokenizer", "workers", "corpus")
HLAT = ["HLAT as released", "HLAT, fast tokenizer"]
ENTRIES: list[Entry] = [
    *[(name, "bytes", 0, "short") for name in [*ENCODERS, *OURS, HLAT[1], *PEERS]],
    *[(name, "pieces", 0, "short") for name in [*ENCODERS, *OURS, *HLAT]],
    *[(name, "bytes", 2, "short") for name in [*OURS, *WITH_WORKERS]],
    *[(name, "bytes", 0, "long") for name in [*ENCODERS, *OURS, *PEERS]],
]
WARM_UP_SECONDS = 1.0
TIMEOUT_SECONDS = 900


def measure(entry: Entry, scratch: Path, seconds: float) -> dict[str, Any]:
    """Run one process; return its result, or the last line of its error message."""
    name, tokenizer, workers, corpus = entry
    request = {"name": name, "scratch": str(scratch), "seconds": seconds}
    request |= {"tokenizer": tokenizer, "workers": workers, "corpus": corpus}
    command = [sys.executable, str(HERE / "measure.py"), json.dumps(request)]
    try:
        done = subprocess.run(
            command,
            env=environment(scratch),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {"failure": f"no result after {TIMEOUT_SECONDS} s"}
    if done.returncode:
        return {"failure": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def environment(scratch: Path) -> dict[str, str]:
    """Return the environment: one tokenizer thread, caches in `scratch`, no network."""
    return os.environ | {
        "PYTHONPATH": str(HERE.parent.parent),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HOME": str(scratch / "cache"),
        "HF_HUB_OFFLINE": "1",
        "HLAT_CACHE": str(scratch / "cache" / "hlat"),
    }


def summarise(entry: Entry, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of an entry; the first result is that with empty caches."""
    cold, *runs = results
    row: dict[str, Any] = dict(zip(KEYS, entry, strict=True))
    failures = [run["failure"] for run in results if "failure" in run]
    if failures:
        return row | {"failure": failures[-1], "failures": len(failures)}
    row["first_ever_batch_seconds"] = round(cold["first_batch_seconds"], 2)
    keys = [key for key in runs[0] if key != "tokens"]
    return row | {key: spread([run[key] for run in runs]) for key in keys}


def add_fractions(rows: list[dict[str, Any]]) -> None:
    """Add the rates relative to those of the two encoders, per CPU-second, to the rows."""
    by_entry = {(row["contestant"], row["tokenizer"], row["corpus"]): row for row in rows}
    for row in rows:
        for encoder in ("reference", "fast"):
            limit = by_entry.get((f"{encoder} encoder alone", row["tokenizer"], row["corpus"]))
            if "failure" in row or not limit or "failure" in limit:
                continue
            rate, maximum = (r["tokens_per_cpu_second"]["median"] for r in (row, limit))
            row[f"fraction_of_{encoder}_encoder"] = round(rate / maximum, 3)


def read_rows(path: Path) -> dict[Any, dict[str, Any]]:
    """Return the rows of an earlier call by entry."""
    if not path.exists():
        return {}
    rows = json.loads(path.read_text())["rows"]
    return {tuple(row[key] for key in KEYS): row for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument(
        "--only", nargs="+", default=[""], help="contestants whose name contains one of these"
    )
    parser.add_argument("--output", type=Path, default=HERE / "result.json")
    arguments = parser.parse_args()
    scratch = arguments.scratch.resolve()
    entries = [entry for entry in ENTRIES if any(text in entry[0] for text in arguments.only)]
    runs: dict[Any, list[dict[str, Any]]] = {entry: [] for entry in entries}
    shutil.rmtree(scratch / "cache", ignore_errors=True)
    for repetition in range(arguments.rounds + 1):
        for entry in entries:
            result = measure(entry, scratch, arguments.seconds if repetition else WARM_UP_SECONDS)
            print(repetition, *entry, result, flush=True)
            runs[entry].append(result)
    rows_of = read_rows(arguments.output)
    rows_of |= {entry: summarise(entry, results) for entry, results in runs.items()}
    rows = [rows_of[entry] for entry in ENTRIES if entry in rows_of]
    add_fractions(rows)
    corpus = json.loads((scratch / "corpus.json").read_text())
    protocol = {"rounds": arguments.rounds, "seconds": arguments.seconds}
    result = {
        "machine": describe_machine(LIBRARIES),
        "corpora": corpus,
        "protocol": protocol,
        "rows": rows,
    }
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
