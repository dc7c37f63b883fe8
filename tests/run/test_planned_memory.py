"""Planned and measured memory of a whole training process."""

import pytest

from hlat.config.resolve import resolve_config
from hlat.plan.memory_estimate import estimate_memory


@pytest.mark.slow  # starts a process with the default model
@pytest.mark.parametrize("overrides", [(), ("model.hidden_size=256", "model.num_layers=8")])
def test_planned_memory_of_a_process_on_a_cpu(runner, compose, overrides):
    runner.small = [f"run.root={runner.folder / 'runs'}", *overrides]
    done = runner.run_process("run.name=x", "run.steps=8", "checkpoint.every_steps=4")
    assert done.returncode == 0, done.stderr
    planned = estimate_memory(resolve_config(compose(*overrides))).total
    measured = max(row["memory_bytes"] for row in runner.rows("x", "metrics.jsonl"))
    assert planned == pytest.approx(measured, rel=0.1)
