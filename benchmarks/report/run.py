"""Measure the time and the page size of the report of a long run.

Usage: PYTHONPATH=. python benchmarks/report/run.py

Writes a run of a million logged steps with four attempts, evaluations and spikes into a temporary
directory. `python -m hlat.report` writes its report in a new process, once as a warm-up and then
REPETITIONS times. The metric is CPU time, because it does not depend on other load. Writes
result.json.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import describe_machine, spread

HERE = Path(__file__).resolve().parent
STEPS, ATTEMPTS, EVALUATIONS, REPETITIONS = 1_000_000, 4, 100, 5
START, TOKENS_PER_STEP, STEP_S = 1_763_654_400.0, 4_194_304, 0.5


def attempt(step: int) -> int:
    return 1 + (step - 1) * ATTEMPTS // STEPS


def row(step: int, rng: random.Random) -> dict[str, Any]:
    return {
        "step": step,
        "tokens": step * TOKENS_PER_STEP,
        "loss": 2 + 8 / step**0.5 + rng.gauss(0, 0.05),
        "grad_norm": 1 + abs(rng.gauss(0, 0.3)),
        "param_norm": 60 + step / STEPS,
        "learning_rate": 3e-4 * (1 - step / STEPS),
        "memory_bytes": 2**30,
        "tokens_per_second": TOKENS_PER_STEP / STEP_S + rng.gauss(0, 1e4),
        "step_seconds": STEP_S,
        "data_wait_seconds": 0.005 * rng.random(),
        "mfu": 0.3 + rng.gauss(0, 0.001),
        "cost_usd": 0.1 * step,
        "cpt_usd": 1.0,
        "phase": "main",
        "attempt": attempt(step),
        "time": START + step * STEP_S,
    }


def event(name: str, step: int, **details: Any) -> dict[str, Any]:
    common = {"step": step, "attempt": attempt(max(1, step)), "time": START + step * STEP_S}
    return {"event": name, **common, **details}


def write_run(folder: Path) -> None:
    rng = random.Random(0)
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps(row(step, rng)) + "\n" for step in range(1, STEPS + 1))
    events = [event("start", 0, began=START - 30)]
    events += [event("resume", 1 + i * STEPS // ATTEMPTS) for i in range(1, ATTEMPTS)]
    for i in range(1, EVALUATIONS + 1):
        bits = dict.fromkeys(("code", "prose", "mean"), 1 + 1 / i)
        events.append(
            event("evaluate", i * STEPS // EVALUATIONS, bits_per_byte=bits, loss=bits, seconds=0.1)
        )
    events += [event("spike", rng.randrange(1, STEPS)) for _ in range(1000)]
    events.sort(key=lambda entry: entry["time"])
    (folder / "events.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in events))


def measure(folder: Path) -> dict[str, float]:
    """Return the seconds and the memory of one process."""
    start = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-m", "hlat.report", str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(child.pid, 0)
    assert status == 0, f"the report ended with {os.waitstatus_to_exitcode(status)}"
    return {
        "processor_s": used.ru_utime + used.ru_stime,
        "wall_s": time.perf_counter() - start,
        "memory_bytes": used.ru_maxrss * 1024,
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        write_run(folder)
        measure(folder)
        measured = [measure(folder) for _ in range(REPETITIONS)]
        result = {
            "machine": describe_machine(["matplotlib", "numpy", "orjson"]),
            "steps": STEPS,
            "metrics_bytes": (folder / "metrics.jsonl").stat().st_size,
            "page_bytes": (folder / "report.html").stat().st_size,
            "repetitions": REPETITIONS,
            **{key: spread([values[key] for values in measured]) for key in measured[0]},
            "measured": measured,
        }
    (HERE / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({key: result[key] for key in ("processor_s", "wall_s", "page_bytes")}))


if __name__ == "__main__":
    main()
