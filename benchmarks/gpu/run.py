"""Run tests, benchmarks and a profile on a GPU within 8 minutes.

Usage: python benchmarks/gpu/run.py [--device cpu] [--parts step,profile] [--output build/gpu]

Parts run in the order of `PARTS`, each in separate processes and with a time limit. If a part fails
or reaches its limit, its error is recorded and the next one starts. result.json is written after
each part and contestant, so no result is lost after an interruption. A later call replaces the
parts and rows that it measures. Missing packages are installed from a directory of wheels (make
gpu-wheels), without network. This file needs only the standard library.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
Json = dict[str, Any]
Record = Callable[[Json], None]

SHAPES = {"cpu": ["tiny"], "cuda": ["1b", "3b", "0.3b"]}
RECIPES = ["bf16", "mixed", "bf16_sr"]
CONTESTANTS = [
    ["ours, compiled, nondeterministic", "plain, compiled"],
    ["ours, compiled", "transformers"],
    ["ours"],
]
"""Contestants by priority: all shapes and recipes of the first group are measured first. Peers do
not use deterministic algorithms, because these exclude cuDNN's attention."""
TITAN = "torchtitan, compiled"
MATMUL = "matmul"
PROFILED = [
    ("ours, compiled, nondeterministic", "bf16"),
    ("ours, compiled, nondeterministic", "bf16_sr"),
    ("ours", "bf16"),
]
TESTS = [
    "tests/cuda/test_stochastic_rounding.py",
    "tests/cuda/test_step.py",
    "tests/cuda/test_checkpoints.py",
    "tests/run/test_cuda.py",
    "tests/cuda/test_equality.py",
]
MAX_CONTESTANT_SECONDS = 100
SUMMARY_SECONDS = 5
"""Time for the summary of pytest after an interrupt."""
LOSS_TOLERANCES = {"fp32": 1e-5, "bf16": 5e-3, "mixed": 5e-3, "bf16_sr": 5e-3}
"""Largest relative difference of the first losses of contestants (benchmarks/step/run.py)."""


@dataclass(frozen=True)
class Settings:
    """Settings of one call.

    Attributes:
        seconds: Duration of an interval of steps; three are measured.
        peers: Directory that contains torchtitan-0.3.0; None: without torchtitan.
        environment: Environment variables of all processes.
    """

    device: str
    shapes: list[str]
    recipes: list[str]
    seconds: float
    peers: Path | None
    output: Path
    environment: dict[str, str]


class Script:
    """Process of a script of this directory, which prints a line with RESULT and JSON."""

    def __init__(self, settings: Settings, script: str, *arguments: str) -> None:
        self._log_path = settings.output / "logs" / f"{time.monotonic_ns()}_{script}.log"
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / script), *arguments],
                env=settings.environment,
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def read_result(self, deadline: float) -> Json:
        """Send the start line and return the result or the failure."""
        seconds = max(1.0, deadline - time.monotonic())
        try:
            output, _ = self._process.communicate("go\n", timeout=seconds)
        except subprocess.TimeoutExpired:
            self.close()
            return {"failure": f"not finished after {seconds:.0f} s"}
        for line in output.splitlines():
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
        lines = self._log_path.read_text().strip().splitlines()
        return {"failure": lines[-1] if lines else f"exit code {self._process.returncode}"}

    def close(self) -> None:
        """Kill the process and its children."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def describe_environment(settings: Settings, deadline: float, record: Record) -> Json:
    """Return versions, device and a burn-in with known results."""
    return Script(settings, "describe.py", settings.device).read_result(deadline)


def run_tests(settings: Settings, deadline: float, record: Record) -> Json:
    """Run the tests marked cuda; at the time limit, return the results so far."""
    command = [sys.executable, "-m", "pytest", "-v", "-m", "cuda", "-W", "default"]
    command += ["--accelerator", settings.device, "--show-capture=no", "--durations=8", *TESTS]
    log_path = settings.output / "tests.log"
    with log_path.open("w") as log:
        process = subprocess.Popen(
            command,
            env=settings.environment,
            cwd=REPOSITORY,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        failure = None
        try:
            process.wait(max(1.0, deadline - SUMMARY_SECONDS - time.monotonic()))
        except subprocess.TimeoutExpired:
            interrupt(process)
            failure = "the time of the part is over"
    result = parse_tests(log_path.read_text())
    if not any(result["counts"].values()):
        failure = failure or (log_path.read_text().strip().splitlines() or ["no output"])[-1]
    return result | ({"failure": failure} if failure else {})


def interrupt(process: "subprocess.Popen[bytes]") -> None:
    """Interrupt a process, so that it prints its summary, and kill its group."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(SUMMARY_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def parse_tests(output: str) -> Json:
    """Return counts and failures from the output of pytest -v."""
    outcomes = re.findall(r"^(\S+::.*) (PASSED|FAILED|ERROR|SKIPPED)\b", output, re.MULTILINE)
    counts = dict.fromkeys(("PASSED", "FAILED", "ERROR", "SKIPPED"), 0)
    for _, outcome in outcomes:
        counts[outcome] += 1
    failed = [name for name, outcome in outcomes if outcome in ("FAILED", "ERROR")]
    summary = re.findall(r"^(?:FAILED|ERROR) (\S+::.*?) - (.*)$", output, re.MULTILINE)
    reasons = re.findall(r"^SKIPPED (\[\d+\] .*)$", output, re.MULTILINE)
    slowest = re.findall(r"^\s*([\d.]+)s (?:call|setup) +(\S+::.*)$", output, re.MULTILINE)
    return {
        "counts": counts,
        "failed": failed,
        "messages": dict(summary),
        "skipped": reasons,
        "slowest": [[float(seconds), name] for seconds, name in slowest],
    }


def measure_steps(settings: Settings, deadline: float, record: Record) -> Json:
    """Measure all contestants; the next one is imported while another one is measured."""
    entries = list_entries(settings)
    rows: list[Json] = []
    following: Script | None = None
    for index, entry in enumerate(entries):
        row: Json = dict(zip(("contestant", "shape", "recipe"), entry, strict=True))
        if time.monotonic() >= deadline:
            rows.append(row | {"failure": "not started, the time of the part is over"})
            continue
        current = following or start_contestant(settings, entry)
        following = None
        if index + 1 < len(entries):
            following = start_contestant(settings, entries[index + 1])
        limit = min(deadline, time.monotonic() + MAX_CONTESTANT_SECONDS)
        rows.append(row | current.read_result(limit))
        print(json.dumps(rows[-1]), flush=True)
        record({"rows": compare_losses(rows)})
    if following is not None:
        following.close()
    return {"rows": compare_losses(rows), "seconds": settings.seconds}


def list_entries(settings: Settings) -> list[tuple[str, str, str]]:
    """Return contestant, shape and recipe of each process; only ours has stochastic rounding."""
    groups = [[*CONTESTANTS[0], *([TITAN] if settings.peers else [])], *CONTESTANTS[1:]]
    if settings.device == "cpu":  # a rehearsal, where compilers need the most time
        groups.reverse()
    return [
        (MATMUL, settings.shapes[0], "bf16"),
        *(
            (name, shape, recipe)
            for names in groups
            for shape in settings.shapes
            for recipe in settings.recipes
            for name in names
            if name.startswith("ours") or recipe != "bf16_sr"
        ),
    ]


def start_contestant(settings: Settings, entry: tuple[str, str, str]) -> Script:
    """Start the process of a contestant, which waits before it uses the device."""
    request = dict(zip(("name", "shape", "recipe"), entry, strict=True))
    request |= {"device": settings.device, "seconds": settings.seconds}
    return Script(settings, "contestant.py", json.dumps(request))


def compare_losses(rows: list[Json]) -> list[Json]:
    """Return the rows with the relative difference of the first loss from that of hlat."""
    references = {
        (row["shape"], row["recipe"]): row["first_loss"]
        for row in reversed(rows)
        if row["contestant"].startswith("ours") and "first_loss" in row
    }
    compared = []
    for row in rows:
        reference = references.get((row["shape"], row["recipe"]))
        if reference and "first_loss" in row:
            difference = abs(row["first_loss"] / reference - 1)
            row = row | {
                "loss_difference": difference,
                "same_loss": difference <= LOSS_TOLERANCES[row["recipe"]],
            }
        compared.append(row)
    return compared


def profile_steps(settings: Settings, deadline: float, record: Record) -> Json:
    """Profile one step of hlat in the first shape."""
    profiles: list[Json] = []
    for name, recipe in PROFILED if settings.device == "cuda" else PROFILED[::-1]:
        request = {"name": name, "shape": settings.shapes[0], "recipe": recipe}
        row: Json = {"contestant": name, "shape": settings.shapes[0], "recipe": recipe}
        if time.monotonic() >= deadline:
            profiles.append(row | {"failure": "not started, the time of the part is over"})
            continue
        arguments = json.dumps(request | {"device": settings.device})
        script = Script(settings, "profile_step.py", arguments)
        profiles.append(row | script.read_result(deadline))
        record({"profiles": profiles})
    return {"profiles": profiles}


def measure_attention(settings: Settings, deadline: float, record: Record) -> Json:
    """Measure the kernels of attention in the shapes with the longest sequences."""
    arguments = (settings.device, *settings.shapes[:2])
    return Script(settings, "attention.py", *arguments).read_result(deadline)


def measure_loader(settings: Settings, deadline: float, record: Record) -> Json:
    """Measure the tokens per second of the loader in the batches of the first shape."""
    arguments = (settings.shapes[0], str(settings.seconds))
    return Script(settings, "loader.py", *arguments).read_result(deadline)


PARTS: dict[str, tuple[Callable[[Settings, float, Record], Json], float]] = {
    "environment": (describe_environment, 0.05),
    "tests": (run_tests, 0.24),
    "step": (measure_steps, 0.5),
    "profile": (profile_steps, 0.11),
    "attention": (measure_attention, 0.06),
    "loader": (measure_loader, 0.04),
}
"""Function and fraction of the time of each part, in addition to unused time of earlier parts."""
PAGE_SECONDS = 10
"""Time to write the page, after all parts."""


def run_part(
    part: Callable[[Settings, float, Record], Json],
    settings: Settings,
    deadline: float,
    record: Record,
) -> Json:
    """Return the result of a part, with its error if it fails, and its time."""
    start = time.monotonic()
    try:
        result = part(settings, deadline, record)
    except Exception:  # the next part must run
        result = {"failure": traceback.format_exc()}
    return result | {"part_seconds": round(time.monotonic() - start, 1)}


def merge_part(name: str, before: Json, new: Json) -> Json:
    """Return the result of a part with the rows of an earlier call that are not replaced."""
    if name != "step" or "rows" not in before:
        return new

    def key(row: Json) -> tuple[str, ...]:
        return row["contestant"], row["shape"], row["recipe"]

    rows = {key(row): row for row in before["rows"]}
    for row in new.get("rows", []):
        if "failure" not in row or key(row) not in rows:
            rows[key(row)] = row
    return new | {"rows": [*rows.values()]}


def install_missing_packages(wheels: Path, target: Path) -> list[str]:
    """Install the wheels of missing packages to `target`; return their names."""
    installed = {
        normalize(item.metadata["Name"])
        for item in importlib.metadata.distributions()
        if item.metadata["Name"]
    }
    missing = [
        path
        for path in sorted(wheels.glob("*.whl"))
        if normalize(path.name.split("-")[0]) not in installed
    ]
    if missing:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        command += ["--no-compile", "--find-links", str(wheels), "--target", str(target)]
        subprocess.run([*command, *map(str, missing)], check=True)
    return [path.name for path in missing]


def normalize(name: str) -> str:
    """Return the normalized name of a package (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def build_environment(packages: Path, caches: Path, peers: Path | None) -> dict[str, str]:
    """Return the environment variables of all processes, with an empty cache of compilers."""
    paths = [REPOSITORY, HERE.parent / "step", packages]
    inherited = os.environ.get("PYTHONPATH")
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *([inherited] if inherited else [])]),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        **({"PEERS": str(peers.resolve())} if peers else {}),
    }


def run_parts(settings: Settings, names: list[str], minutes: float, result: Json) -> None:
    """Run the parts, and write result.json after each of them."""
    path = settings.output / "result.json"
    start, fraction = time.monotonic(), 0.0
    available = minutes * 60 - PAGE_SECONDS
    total = sum(PARTS[name][1] for name in names)
    for name in names:
        part, part_fraction = PARTS[name]
        fraction += part_fraction / total
        before = result.get(name, {})

        def record(value: Json, name: str = name, before: Json = before) -> None:
            result[name] = merge_part(name, before, value)
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps(result, indent=2) + "\n")
            temporary.replace(path)

        print(f"{name}: until {fraction * available:.0f} s", flush=True)
        record(run_part(part, settings, start + fraction * available, record))
        print(json.dumps(result[name])[:2000], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--minutes", type=float, default=8, help="time of all parts together")
    parser.add_argument("--parts", default=",".join(PARTS), help="separated by commas")
    parser.add_argument("--shapes", help="separated by commas (benchmarks/step/contestants.py)")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="separated by commas")
    parser.add_argument(
        "--seconds", type=float, default=1.5, help="duration of an interval of steps"
    )
    parser.add_argument("--torchtitan", type=Path, help="directory of torchtitan-0.3.0")
    parser.add_argument("--wheels", type=Path, default=REPOSITORY / "build" / "gpu-wheels")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "build" / "gpu")
    arguments = parser.parse_args()
    output = arguments.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    path = output / "result.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    if result.get("device") != arguments.device:
        result = {}
    with tempfile.TemporaryDirectory() as folder:
        packages = Path(folder) / "packages"
        result["installed_wheels"] = install_missing_packages(arguments.wheels, packages)
        settings = Settings(
            device=arguments.device,
            shapes=arguments.shapes.split(",") if arguments.shapes else SHAPES[arguments.device],
            recipes=arguments.recipes.split(","),
            seconds=arguments.seconds,
            peers=arguments.torchtitan,
            output=output,
            environment=build_environment(packages, Path(folder), arguments.torchtitan),
        )
        result["device"] = arguments.device
        run_parts(settings, arguments.parts.split(","), arguments.minutes, result)
        script = Script(settings, "render.py", str(output))
        print(script.read_result(time.monotonic() + PAGE_SECONDS + 20))


if __name__ == "__main__":
    main()
