"""Makes folders as a run leaves them."""

import json
import math
from pathlib import Path
from typing import Any

START = 1_763_654_400.0
TOKENS_PER_STEP = 4096


def metrics_row(step: int, **changes: Any) -> dict[str, Any]:
    row = {
        "step": step,
        "tokens": step * TOKENS_PER_STEP,
        "loss": 10 / math.sqrt(step),
        "grad_norm": 1.5,
        "param_norm": 60 + step / 100,
        "learning_rate": 3e-4,
        "tokens_per_second": 8192.0,
        "step_seconds": 0.5,
        "data_wait_seconds": 0.005,
        "mfu": None,
        "phase": "main",
        "attempt": 1,
        "time": START + step / 2,
    }
    return row | changes


def event_row(event: str, step: int, **details: Any) -> dict[str, Any]:
    return {"event": event, "step": step, "attempt": 1, "time": START + step / 2, **details}


def evaluation(step: int, bits: float) -> dict[str, Any]:
    return event_row(
        "evaluate",
        step,
        loss={"code": 2 * bits, "docs": 2 * bits + 1},
        bits_per_byte={"code": bits, "docs": bits + 0.5, "mean": bits + 0.25},
    )


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_run(folder: Path, steps: int = 50) -> Path:
    folder.mkdir(parents=True)
    write_lines(folder / "metrics.jsonl", [metrics_row(step) for step in range(1, steps + 1)])
    events = [
        event_row("start", 0),
        evaluation(0, 3.9),
        event_row("resume", steps // 2, attempt=2, refused=["checkpoint step_00000030 is refused"]),
        event_row("phase", steps // 2, attempt=2, name="upsample"),
        evaluation(steps, 2.125),
        event_row("finish", steps, attempt=2, reason="all steps are done", exit_code=0),
    ]
    write_lines(folder / "events.jsonl", events)
    (folder / "config.yaml").write_text("model:\n  name: tiny\n")
    provenance = {"git_revision": "292ee1e", "git_diff": "+a\n-b", "packages": {"torch": "2.13.0"}}
    (folder / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")
    return folder
