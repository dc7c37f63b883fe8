"""Small run directories."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a run below `root`, or `tmp_path / "runs"`."""

    def write(
        name: str,
        lr: float = 0.1,
        seed: int = 1,
        bits: float = 2.0,
        end: str | None = "finish",
        root: Path = tmp_path / "runs",
        settings: dict[str, object] | None = None,
    ) -> Path:
        run_dir = root / name
        run_dir.mkdir(parents=True, exist_ok=True)
        row = {"step": 5, "tokens": 512, "loss": 3.0, "tokens_per_second": 100.0, "time": 1005.0}
        evaluation = {"bits_per_byte": {"code": bits + 1, "mean": bits}}
        events = [
            {"event": "start", "step": 0, "attempt": 1, "time": 1000.0, "began": 999.0},
            {"event": "evaluate", "step": 5, "attempt": 1, "time": 1005.0} | evaluation,
        ]
        if end is not None:
            events.append({"event": end, "step": 5, "attempt": 1, "time": 1006.0})
        config = {
            "run": {"name": name, "seed": seed, "root": "runs"},
            "optimizer": {"lr": lr, "name": "adamw", "decay_norms": False},
            "compiler": {"environment": {}, "flags": []},
            **(settings or {}),
        }
        origin = {"git_revision": "abc", "git_diff": "", "data": {"x": 1}, "hosts": ["n1"]}
        (run_dir / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        (run_dir / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
        (run_dir / "config.yaml").write_text(json.dumps(config))
        (run_dir / "provenance.json").write_text(json.dumps(origin))
        return run_dir

    return write
