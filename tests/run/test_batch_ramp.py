"""Runs with a growing batch and growing sequences: resume, layouts, and the order of the data."""

import signal

import numpy as np
import pytest

GROWTH = (
    *("batch.ramp.start=2", "batch.ramp.tokens=4000", "batch.micro_batch_size=1"),
    *("batch.length_warmup.start=16", "batch.length_warmup.tokens=3000", "schedule.total_steps=12"),
)
"""Sizes 2, 4 and 6 before 8, and lengths 16 and 32 before 64."""
NUM_STEPS = 24
LAYOUTS = {
    "dp2+zero1": "dp=2 zero=1",
    "pp2": "pp=2",
    "interleaved": "pp=2 pipeline_schedule=interleaved stages_per_rank=2",
    "tp2+sp": "tp=2 sequence_parallel=true",
    "dp2+zero3": "dp=2 zero=3",
}


def test_resume_within_the_ramp_is_bit_identical(runner) -> None:
    killed = runner.run_until(7, signal.SIGKILL, "run.name=x", *GROWTH)
    assert killed.returncode == -signal.SIGKILL
    again = runner.run("run.name=x", *GROWTH)
    assert again.returncode == 0, again.stderr
    assert runner.run("run.name=whole", *GROWTH).returncode == 0
    assert runner.losses("x") == runner.losses("whole")
    assert runner.weights("x", NUM_STEPS) == runner.weights("whole", NUM_STEPS)
    tokens = [row["tokens"] for row in runner.rows("whole", "metrics.jsonl")]
    assert len(tokens) == NUM_STEPS
    sizes = np.diff([0, *tokens])
    assert [*dict.fromkeys(sizes)] == [128, 256, 384, 512]
    assert 12 * 512 <= tokens[-1] < 13 * 512
    refused = runner.run("run.name=x", *GROWTH, "batch.ramp.tokens=5000")
    assert refused.returncode == 2
    assert "batch.ramp: the checkpoint was written with" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "precision"), [*((layout, "fp32") for layout in LAYOUTS), ("dp2+zero1", "bf16_sr")]
)
def test_layouts_train_alike(runner, layout: str, precision: str) -> None:
    common = (*GROWTH, f"precision={precision}", "run.steps=12", "model.num_layers=4")
    one = runner.run("run.name=one", *common)
    assert one.returncode == 0, one.stderr
    settings = [f"parallelism.{word}" for word in LAYOUTS[layout].split()]
    many = runner.run_process("run.name=many", *common, *settings)
    assert many.returncode == 0, many.stderr
    losses = [np.array([loss for _, loss in runner.losses(name)]) for name in ("one", "many")]
    assert len(losses[0]) == 12
    tolerance = 1e-5 if precision == "fp32" else 1e-2
    np.testing.assert_allclose(losses[1], losses[0], rtol=tolerance)
