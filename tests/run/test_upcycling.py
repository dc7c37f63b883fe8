"""A run with experts starts from an exported dense run, resumes, is evaluated and exported."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hlat import export
from hlat.doctor.__main__ import run_doctor
from tests.run.conftest import Runner, call_command

transformers = pytest.importorskip("transformers")

MODEL = "model=qwen3_tiny"
MOE = [
    *(MODEL, "model.family=qwen3_moe", "model.mlp.kind=moe", "model.init_from=dense"),
    *("model.mlp.moe.num_experts=8", "model.mlp.moe.intermediate_size=88"),
]
NOISE = "model.mlp.moe.upcycling_noise"


@pytest.fixture
def dense(runner: Runner) -> Runner:
    """Return a runner with the export `dense` of a short run."""
    done = runner.run(MODEL, "run.name=source", "run.steps=5", "optimizer.lr=1e-2")
    assert done.returncode == 0, done.stderr
    exported = call_command(export.main, runner.folder, "runs/source", "--output", "dense")
    assert exported.code == 0, exported.err
    return runner


def load_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits that transformers computes with a directory."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(tokens).logits


def read_event(runner: Runner, name: str) -> dict[str, Any]:
    """Return the first event of a run that has a directory of initial weights."""
    return next(row for row in runner.rows(name, "events.jsonl") if "init_from" in row)


@pytest.mark.slow  # several runs
def test_training_resume_and_export(dense: Runner) -> None:
    fixed = ("optimizer.lr=1e-30", "optimizer.weight_decay=0", "run.steps=2")
    assert dense.run(MODEL, "run.name=copy", "model.init_from=dense", *fixed).returncode == 0
    done = dense.run("run.name=exact", *MOE, f"{NOISE}=0", *fixed)
    assert done.returncode == 0, done.stderr
    assert (
        "starting from the weights in dense; experts are copies of the dense network, noise 0"
        in done.stdout
    )
    for (step, loss), (_, expected) in zip(
        dense.losses("exact"), dense.losses("copy"), strict=True
    ):
        assert loss == pytest.approx(expected, rel=1e-5), step
    key = "init_from_fingerprint"
    assert read_event(dense, "exact")[key] == read_event(dense, "copy")[key]
    exported = call_command(export.main, dense.folder, "runs/exact", "--output", "out")
    assert exported.code == 0, exported.err
    assert NOISE not in exported.out
    config = json.loads((dense.folder / "out/config.json").read_text())
    assert config["model_type"] == "qwen3_moe"
    tokens = torch.randint(0, config["vocab_size"], (2, 33))
    found, expected = (load_logits(dense.folder / name, tokens) for name in ("out", "dense"))
    assert float((found - expected).norm() / expected.norm()) < 1e-5

    settings = (*MOE, f"{NOISE}=0.1")
    whole = dense.run("run.name=whole", *settings, "run.steps=10")
    assert whole.returncode == 0, whole.stderr
    assert dense.losses("whole")[0] != dense.losses("exact")[0]
    assert dense.run("run.name=parts", *settings, "run.steps=5").returncode == 0
    (dense.folder / "dense").rename(dense.folder / "moved")
    assert dense.run("run.name=parts", *settings, "run.steps=10").returncode == 0
    assert dense.losses("parts") == dense.losses("whole")
    assert dense.weights("parts", 10) == dense.weights("whole", 10)
    changed = dense.run("run.name=parts", *MOE, f"{NOISE}=0.2", "run.steps=12")
    assert changed.returncode == 2
    assert f"{NOISE} was 0.1, is 0.2; set it back or choose another run.name" in changed.stderr


@pytest.mark.slow  # a run, and checks of the doctor
def test_refusals_and_doctor(dense: Runner) -> None:
    done = dense.run("run.name=x", *MOE)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"set {NOISE}=0 to start each expert as a copy of the dense network" in done.stderr
    done = dense.run("run.name=x", *MOE, f"{NOISE}=0", "model.num_layers=3")
    assert done.returncode == 2
    assert "set model.num_layers=2" in done.stderr
    assert not (dense.folder / "runs/x").exists()
    checked = dense.run("run.name=x", *MOE, f"{NOISE}=0.1", task=run_doctor)
    assert checked.returncode == 0, checked.stdout + checked.stderr
