"""Measure our loader with 10**9 rows, a million documents, and a consumer with a fixed rate.

Usage: python benchmarks/data/scale.py SCRATCH [--files 1000] [--documents 1000000]

* `rows`: seconds until the first batch of 10**9 rows (1,000 hard links to one file of 10**6 short
  rows, about 130 MB, removed afterwards), and the same with one link;
* `memory`: resident memory every 50,000 documents of `lines`;
* `permutation`: microseconds per document for orders of up to 10**10 documents;
* `waiting`: share of the time that a consumer waits, if it reads at half of the loader's rate.

Writes scale.json.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from contestants import LENGTH, ROWS, load_module, make_settings
from run import HERE, LIBRARIES, environment

from benchmarks.common import describe_machine, spread
from hlat.data.permutation import Permutation

ROWS_OF_FILE = 1_000_000
ROWS_PER_BATCH = 65_536
NAMES = {"reference": "ours", "fast": "ours, fast encoder"}
REPETITIONS = 5
BLOCK = 4096


def write_rows(path: Path) -> None:
    """Write a file of distinct short rows."""
    schema = pa.schema([("text", pa.string())])
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for start in range(0, ROWS_OF_FILE, ROWS_PER_BATCH):
            rows = range(start, min(start + ROWS_PER_BATCH, ROWS_OF_FILE))
            writer.write_batch(
                pa.record_batch([pa.array([" ".join([str(i)] * 16) for i in rows])], schema=schema)
            )


def link_rows(scratch: Path, num_files: int) -> Path:
    """Write a corpus of hard links to one file and return its directory."""
    folder = scratch / "corpora" / f"rows-{num_files}" / "one"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    first = folder / "00000.arrow"
    if shutil.disk_usage(scratch).free < 1 << 30:
        raise OSError(f"{scratch}: less than 1 GiB is free")
    write_rows(first)
    for number in range(1, num_files):
        os.link(first, folder / f"{number:05}.arrow")
    return folder.parent


def resident_bytes() -> dict[str, int]:
    """Return the private memory of this process, and the pages of mapped files."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    keys = {"own_bytes": "RssAnon", "mapped_bytes": "RssFile"}
    return {key: int(fields[field].split()[0]) * 1024 for key, field in keys.items()}


def open_corpus(scratch: Path, encoder: str, corpus: str, workers: int = 0) -> Any:
    """Return the start time after imports, and our loader."""
    settings = make_settings(NAMES[encoder], scratch, corpus=corpus, workers=workers)
    module = load_module(settings)
    return time.perf_counter(), module.open_loader(settings)


def first_batch(scratch: Path, encoder: str, corpus: str) -> dict[str, float]:
    """Measure the seconds until the first batch, without imports."""
    start, loader = open_corpus(scratch, encoder, corpus)
    loader.next()
    return {"seconds": time.perf_counter() - start, **resident_bytes()}


def memory(scratch: Path, encoder: str, documents: int, every: int) -> list[dict[str, int]]:
    """Measure resident memory after each `every` documents."""
    _, loader = open_corpus(scratch, encoder, "lines")
    samples = []
    while not samples or samples[-1]["documents"] < documents:
        loader.next()
        read = loader.loader.compute_ledger()["text"]["documents"]
        if read >= every * (len(samples) + 1):
            samples.append({"documents": read, **resident_bytes()})
    return samples


def permutation(size: int) -> dict[str, float]:
    """Measure the construction of an order, and microseconds per document, single and in blocks."""
    start = time.perf_counter()
    order = Permutation(size, ("epoch", 1, "text", 0))
    constructed = time.perf_counter()
    for index in range(20_000):
        order(index)
    one = time.perf_counter()
    for first in range(0, 200 * BLOCK, BLOCK):
        order(np.arange(first, first + BLOCK))
    blocks = time.perf_counter()
    return {
        "size": size,
        "make_microseconds": (constructed - start) * 1e6,
        "microseconds": (one - constructed) / 20_000 * 1e6,
        "block_microseconds": (blocks - one) / (200 * BLOCK) * 1e6,
    }


def waiting(scratch: Path, encoder: str, workers: int, seconds: float) -> dict[str, Any]:
    """Measure the share of the time that a consumer waits at half of the loader's rate."""
    _, loader = open_corpus(scratch, encoder, "short", workers)
    for _ in range(20):
        loader.next()
    start, batches = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        loader.next()
        batches += 1
    period = 2 * (time.perf_counter() - start) / batches
    waits = []
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        loader.next()
        waits.append(loader.loader.wait_seconds)
        time.sleep(max(0.0, period - waits[-1]))
    share = sum(waits) / (time.perf_counter() - start)
    rate = ROWS * LENGTH / period
    return {"workers": workers, "tokens_per_second": rate, "share_waited": share}


TASKS = {f.__name__: f for f in (first_batch, memory, waiting)}


def call(scratch: Path, task: str, **request: Any) -> Any:
    """Run a task in a new process."""
    request |= {"task": task}
    command = [sys.executable, str(HERE / "scale.py"), str(scratch), "--task", json.dumps(request)]
    done = subprocess.run(command, env=environment(scratch), capture_output=True, text=True)
    if done.returncode:
        return {"failure": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure_rows(scratch: Path, encoder: str, num_files: int) -> dict[str, Any]:
    """Measure the first batch of a corpus of `num_files` files."""
    corpus = link_rows(scratch, num_files)
    request = {"encoder": encoder, "corpus": corpus.name}
    results = [call(scratch, "first_batch", **request) for _ in range(REPETITIONS + 1)][1:]
    shutil.rmtree(corpus)
    row: dict[str, Any] = {"rows": num_files * ROWS_OF_FILE}
    if failures := [result for result in results if "failure" in result]:
        return row | failures[0]
    return row | {key: spread([result[key] for result in results]) for key in results[0]}


def study(
    scratch: Path, encoder: str, files: int, documents: int, seconds: float
) -> dict[str, Any]:
    """Measure our loader with one encoder."""
    paced = {"encoder": encoder, "seconds": seconds}
    every = max(1, documents // 20)
    return {
        "rows": [measure_rows(scratch, encoder, count) for count in (1, files)],
        "memory": call(scratch, "memory", encoder=encoder, documents=documents, every=every),
        "waiting": [call(scratch, "waiting", workers=workers, **paced) for workers in (0, 1, 2)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--task", help="internal: run one task of a study")
    parser.add_argument("--output", type=Path, default=HERE / "scale.json")
    arguments = parser.parse_args()
    scratch = arguments.scratch.resolve()
    if arguments.task:
        request = json.loads(arguments.task)
        task = TASKS[request.pop("task")]
        print(json.dumps(task(scratch, **request)), flush=True)
        os._exit(0)
    sizes = (arguments.files, arguments.documents, arguments.seconds)
    result = {
        "machine": describe_machine(LIBRARIES),
        "permutation": [permutation(10**exponent) for exponent in (6, 8, 10)],
        **{encoder: study(scratch, encoder, *sizes) for encoder in NAMES},
    }
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
