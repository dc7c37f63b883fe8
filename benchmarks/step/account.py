"""Divide the training step of hlat into classes of work, each with its limit.

Usage: python benchmarks/step/account.py [--shapes small,0.16b] [--recipes fp32,bf16,mixed]
       python benchmarks/step/account.py --render

Each shape and recipe has a process, which trains eager and compiled, records steps, and measures
the limits. Writes account.json, or replaces rows of it, and the tables of account.md.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from contestants import make_settings
from step_limits import (
    MatmulTimes,
    count_bytes,
    count_matmuls,
    measure_attention_limit,
    measure_bandwidth,
)

from benchmarks.common import describe_machine, machine, table, write_between
from hlat.data.packed_sequences import PackedSequences
from hlat.engine.native.native_engine import NativeEngine
from hlat.engine.step_account import TIME_CLASSES, TimeSlice, compute_account, divide_step
from hlat.engine.trace_events import load_trace
from hlat.model.decoder_spec import count_parameters
from hlat.precision.torch_dtypes import TORCH_DTYPES

HERE = Path(__file__).resolve().parent
MODES = {"eager": "ours", "compiled": "ours, compiled"}
WARM_UP_STEPS, MIN_STEPS, MIN_SECONDS, NUM_RECORDED = 2, 2, 2.0, 5
GAP_BYTES, NUM_GAPS = 1 << 19, 300
KEYS = ("shape", "recipe", "mode")
Json = dict[str, Any]


def report_progress(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


def run_step(engine: NativeEngine, sequences: PackedSequences) -> float:
    """Return the seconds of a step until its metrics are on the host."""
    start = time.perf_counter()
    engine.read_metrics(engine.train_step(sequences, 1e-4))
    return time.perf_counter() - start


def fragment_memory() -> list[torch.Tensor]:
    """Return tensors with gaps between them, in which malloc places the events of a recording.

    Otherwise events take parts of freed large tensors, and each recorded step gets these tensors
    from the kernel, which clears them.
    """
    blocks = [torch.ones(GAP_BYTES // 4) for _ in range(2 * NUM_GAPS)]
    del blocks[::2]
    return blocks


def record_step(engine: NativeEngine, sequences: PackedSequences) -> list[TimeSlice]:
    """Return the time of a recorded step."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json.gz"
        recording = engine.start_recording()
        engine.train_step(sequences, 1e-4)
        recording.stop(Path(folder) / "memory.pickle")
        recording.write_trace(trace)
        return divide_step(load_trace(trace))


def measure_mode(shape: str, recipe: str, mode: str, device: str) -> tuple[Json, list[TimeSlice]]:
    """Return step times and account of a mode, with bytes, and the slices of the median step."""
    settings = make_settings(MODES[mode], shape, recipe, device)
    with closing(NativeEngine()) as engine:
        engine.build(settings.config)
        sequences = PackedSequences(settings.tokens())
        report_progress(f"{shape}, {recipe}, {mode}: warm-up")
        for _ in range(WARM_UP_STEPS):
            run_step(engine, sequences)
        seconds: list[float] = []
        while len(seconds) < MIN_STEPS or sum(seconds) < MIN_SECONDS:
            seconds.append(run_step(engine, sequences))
        report_progress(f"{shape}, {recipe}, {mode}: {statistics.median(seconds):.3f} s per step")
        gaps = fragment_memory()
        recorded = [record_step(engine, sequences) for _ in range(NUM_RECORDED)]
        del gaps
        recorded.sort(key=lambda slices: sum(one.seconds for one in slices))
        slices = recorded[len(recorded) // 2]
        row = {
            **dict(zip(KEYS, (shape, recipe, mode), strict=True)),
            "num_parameters": count_parameters(settings.config.model),
            "step_seconds": statistics.median(seconds),
            "recorded_seconds": sum(one.seconds for one in slices),
            "seconds": compute_account(slices),
            "bytes": count_bytes(engine, settings.config),
        }
    del engine
    gc.collect()
    return row, slices


def measure_shape(shape: str, recipe: str, device: str) -> list[Json]:
    """Return a row for each mode of a shape and recipe, with the limits of its classes."""
    report_progress(f"{shape}, {recipe}: bandwidth")
    bandwidth = measure_bandwidth(device)
    config = make_settings("ours", shape, recipe, device).config
    attention = measure_attention_limit(config, device)
    measured = [measure_mode(shape, recipe, mode, device) for mode in MODES]
    matmuls_of_modes = [count_matmuls(slices) for _, slices in measured]
    sizes = {size for counts in matmuls_of_modes for size in counts}
    report_progress(f"{shape}, {recipe}: {len(sizes)} sizes of matmuls")
    times = MatmulTimes(TORCH_DTYPES[config.precision.compute_dtype], device, sizes)
    rows = []
    for (row, _), counts in zip(measured, matmuls_of_modes, strict=True):
        limits = {name: number / bandwidth for name, number in row.pop("bytes").items() if number}
        matmuls = times.compute_limit(counts)
        row["limits"] = {"matmuls": matmuls, "attention": attention, **limits}
        row["matmul_flops_per_second"] = times.compute_rate(counts)
        rows.append(row | {"bytes_per_second": bandwidth, "threads": torch.get_num_threads()})
    return rows


def run_process(shape: str, recipe: str, device: str, cache: str) -> list[Json]:
    """Measure a shape and recipe in a process with an empty cache of compilers."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]),
        "TORCHINDUCTOR_CACHE_DIR": cache,
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    request = ["--process", shape, recipe, "--device", device]
    done = subprocess.run(
        [sys.executable, str(HERE / "account.py"), *request],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    line = next(text for text in done.stdout.splitlines() if text.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def format_class(name: str, rows: dict[str, Json]) -> list[str]:
    """Return label and, for each mode, milliseconds, share, limit and time divided by limit."""
    cells = [TIME_CLASSES[name][0]]
    for row in rows.values():
        seconds, limit = row["seconds"][name], row["limits"].get(name)
        cells += [f"{1e3 * seconds:,.1f}", f"{seconds / row['recorded_seconds']:.1%}"]
        cells += ["", ""] if limit is None else [f"{1e3 * limit:,.1f}", f"{seconds / limit:.2f}"]
    return cells


def render_group(rows: dict[str, Json]) -> str:
    """Return the table of the modes of a shape and recipe."""
    first = next(iter(rows.values()))
    header = [""]
    for mode in rows:
        header += [f"{mode}, ms", "share", "limit, ms", "of the limit"]
    names = [name for name in TIME_CLASSES if any(row["seconds"][name] for row in rows.values())]
    total = ["Step, recorded"]
    for row in rows.values():
        total += [f"{1e3 * row['recorded_seconds']:,.1f}", "100.0%", "", ""]
    plain = ", ".join(
        f"{mode} {1e3 * row['step_seconds']:,.1f} ms, matmuls "
        f"{row['matmul_flops_per_second'] / 1e9:,.0f} GFLOP/s at their limit"
        for mode, row in rows.items()
    )
    title = (
        f"Shape `{first['shape']}` ({first['num_parameters'] / 1e6:.1f} M parameters), recipe "
        f"`{first['recipe']}`, threads: {first['threads']}."
    )
    bandwidth = f"bandwidth {first['bytes_per_second'] / 1e9:,.1f} GB/s"
    body = table(header, [*(format_class(name, rows) for name in names), total])
    return f"{title}\n\n{body}\n\nSteps without a recording: {plain}; {bandwidth}."


def render(result: Json) -> str:
    """Return a table for each shape and recipe."""
    groups: dict[tuple[str, str], dict[str, Json]] = {}
    for row in result["rows"]:
        groups.setdefault((row["shape"], row["recipe"]), {})[row["mode"]] = row
    return "\n\n".join([*map(render_group, groups.values()), machine(result)])


def write_rows(path: Path, rows: list[Json]) -> None:
    """Write rows, and those of earlier measurements of other shapes and recipes."""
    earlier = json.loads(path.read_text())["rows"] if path.exists() else []
    measured = {tuple(row[key] for key in KEYS) for row in rows}
    others = [row for row in earlier if tuple(row[key] for key in KEYS) not in measured]
    result = {"rows": [*others, *rows], "machine": describe_machine(["torch", "numpy"])}
    path.write_text(json.dumps(result, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="small,0.16b", help="shapes of contestants.py")
    parser.add_argument("--recipes", default="fp32,bf16,mixed")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, default=HERE, help="of account.json and account.md")
    parser.add_argument("--render", action="store_true", help="write the tables only")
    parser.add_argument("--process", nargs=2, metavar=("SHAPE", "RECIPE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process:
        shape, recipe = options.process
        print("RESULT", json.dumps(measure_shape(shape, recipe, options.device)), flush=True)
        return
    path, start = options.folder / "account.json", time.monotonic()
    if not options.render:
        with tempfile.TemporaryDirectory() as cache:
            for shape in options.shapes.split(","):
                for recipe in options.recipes.split(","):
                    write_rows(path, run_process(shape, recipe, options.device, cache))
        report_progress(f"{time.monotonic() - start:.0f} s in all")
    write_between(options.folder / "account.md", "account", render(json.loads(path.read_text())))


if __name__ == "__main__":
    main()
