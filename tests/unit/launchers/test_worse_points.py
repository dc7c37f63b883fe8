"""Points that are worse than their baseline get no further seeds."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hlat.config.compose import import_launcher_module
from hlat.config.run import RunConfig

worse_points = import_launcher_module("local._worse_points")
DESIGN = {"baseline": {"optimizer.lr": 1}, "stop_worse": True}
OFFSETS = {"1": 0.0, "2": 0.5, "3": 0.001}


class Pool:
    """Process pool that writes run directories in place of training."""

    def __init__(self) -> None:
        self.codes: dict[int, int] = {}

    def run(self, work: list) -> dict[int, int]:
        for task, _ in work:
            lr, seed = task.lr, task.point.config.run.seed
            bits = 2 + seed / 10 + OFFSETS[lr]
            bits += np.random.default_rng((seed, int(lr))).normal(0, 0.02)
            config = {"run": {"seed": seed}, "optimizer": {"lr": lr}, "study": DESIGN}
            events = [
                {"event": "evaluate", "step": 1, "time": 1.0, "bits_per_byte": {"mean": bits}},
                {"event": "finish", "step": 1, "time": 1.0, "attempt": 1},
            ]
            task.point.run_dir.mkdir()
            (task.point.run_dir / "config.yaml").write_text(json.dumps(config))
            lines = "".join(json.dumps(event) + "\n" for event in events)
            (task.point.run_dir / "events.jsonl").write_text(lines)
            self.codes[task.number] = 0
        return self.codes


@pytest.mark.parametrize("offset", [0.5, 0.001])
def test_only_the_clearly_worse_point_stops(tmp_path: Path, offset: float) -> None:
    work = []
    for lr in ("1", "2", "3"):
        for seed in range(1, 7):
            config = SimpleNamespace(run=RunConfig(seed=seed))
            overrides = [f"optimizer.lr={lr}", f"run.seed={seed}"]
            point = SimpleNamespace(
                overrides=overrides, config=config, run_dir=tmp_path / f"{lr}-{seed}"
            )
            work.append((SimpleNamespace(number=len(work), point=point, lr=lr), None))
    OFFSETS["2"] = offset
    omitted: list[tuple[int, str]] = []
    console = SimpleNamespace(omit=lambda task, reason: omitted.append((task.number, reason)))
    codes, stopped = worse_points.run_until_worse(Pool(), work, console)
    assert dict(omitted) == stopped
    assert sorted([*codes, *stopped]) == list(range(18))
    if offset == 0.001:
        assert not stopped
    else:
        assert stopped
        assert {work[number][0].lr for number in stopped} == {"2"}
        assert min(stopped) > 7, "two seeds are tested before"
        assert "optimizer.lr=2 - optimizer.lr=1: worse by 0." in stopped[max(stopped)]
