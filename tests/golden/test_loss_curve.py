"""Twenty steps: equal to the recorded losses in fp32, and bit-identical between two runs and across a
resume at step 10.

The record is compared at 1e-5 relative: another processor sums in another order, and twenty steps
amplify the last bit.
On one machine, repeated runs are bit-identical.
"""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hlat import train
from hlat.config.resolve import resolve_config
from hlat.engine import state_shards

GOLDEN = Path(__file__).parent / "loss_20_steps.json"


@pytest.fixture(scope="module")
def train_run(compose, small, tmp_path_factory):
    """Run up to some step under a name and return the loss of every step in metrics.jsonl."""
    root = tmp_path_factory.mktemp("runs")

    def run(name, *overrides):
        composed = compose(
            *small, "optimizer.lr=3e-3", f"run.root={root}", f"run.name={name}", *overrides
        )
        train.run_worker(resolve_config(composed), OmegaConf.to_yaml(composed), [])
        rows = [
            json.loads(line) for line in (root / name / "metrics.jsonl").read_text().splitlines()
        ]
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
        return [row["loss"] for row in rows]

    return run


@pytest.fixture(scope="module")
def fp32_losses(train_run):
    """Losses of one uninterrupted run in fp32."""
    return train_run("fp32")


def test_losses_equal_the_record(fp32_losses, pytestconfig):
    if pytestconfig.getoption("--update"):
        GOLDEN.write_text(json.dumps(fp32_losses, indent=0) + "\n")
    assert fp32_losses == pytest.approx(json.loads(GOLDEN.read_text()), rel=1e-5)


@pytest.mark.slow
def test_two_runs_are_bit_identical(train_run, fp32_losses):
    assert train_run("again") == fp32_losses


@pytest.mark.slow  # 6 s; test_resume.py has others
def test_resumed_run_is_bit_identical(train_run, fp32_losses, monkeypatch):
    assert train_run("resumed", "run.steps=10") == fp32_losses[:10]
    monkeypatch.setattr(state_shards, "compute_initial_values", None)  # they would be overwritten
    assert train_run("resumed") == fp32_losses


@pytest.mark.slow
def test_micro_batch_size_changes_only_summation_order(train_run, fp32_losses):
    assert train_run("accumulated", "batch.micro_batch_size=1") == pytest.approx(
        fp32_losses, rel=1e-5
    )


@pytest.mark.slow
def test_bf16_losses_decrease(train_run):
    curve = train_run("bf16", "precision=bf16")
    assert curve[-1] < curve[0]
