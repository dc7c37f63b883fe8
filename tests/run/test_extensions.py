"""Extensions in training, evaluation, generation, export and the doctor, as a user starts them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.run.conftest import PYTHONPATH
from tests.support import faulty_extensions

EXAMPLES = REPOSITORY / "examples"
ROUTED = ("model=qwen3_moe_tiny", "model.mlp.moe.balance_loss=0.1")
"""Model of which the doctor examines another router."""
GATED = ("extensions=[gated_attention.py]", "model.attention.kind=gated")


@pytest.fixture
def folder(tmp_path) -> Path:
    for file in EXAMPLES.glob("*.py"):
        shutil.copy(file, tmp_path)
    return tmp_path


def test_examples_have_at_most_60_lines() -> None:
    files = [*EXAMPLES.glob("*.py")]
    assert len(files) == 9
    for file in files:
        assert len(file.read_text().splitlines()) <= 60, file


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_train_resume_generate_and_refuse_the_export(hlat, small, folder) -> None:
    def train(*overrides: str):
        return hlat("train", *small, *GATED, "run.name=x", *overrides)

    done = train("run.steps=2", "parallelism.tp=2")
    assert done.returncode == 0, done.stderr
    assert (folder / "runs/x/extensions/gated_attention.py").is_file()
    file = folder / "gated_attention.py"
    file.write_text(file.read_text().replace("self.scale * torch", "1.0 * self.scale * torch"))
    done = train("run.steps=3")
    assert done.returncode == 0, done.stderr
    assert "gated_attention.py has changed since the last start:" in done.stdout
    assert "+        gate_BSN1 = 1.0 * self.scale * torch.sigmoid" in done.stdout
    done = hlat("inference.generate", "runs/x", "The", "max_tokens=2")
    assert done.returncode == 2
    assert done.stderr == (
        "hlat: model.attention.kind=gated is a component of an extension; "
        "add extensions=[gated_attention.py]\n"
    )
    done = hlat("inference.generate", "runs/x", "The", "max_tokens=2", GATED[0])
    assert done.returncode == 0, done.stderr
    done = hlat("report", "runs/x")
    assert done.returncode == 0
    assert done.stderr.startswith("hlat: parameters and FLOPs are missing; add extensions=[gated_")
    done = hlat("report", "runs/x", GATED[0])
    assert done.returncode == 0
    assert done.stderr == ""
    assert "Parameters</dt>" in (folder / "runs/x/report.html").read_text()
    done = hlat("evaluate", "runs/x", "tasks=heldout", GATED[0], "hydra/launcher=kubernetes")
    assert done.returncode == 2
    assert "the job has no access to files of this machine" in done.stderr
    done = hlat("export", "runs/x", "output=exported", GATED[0])
    assert done.returncode == 2
    assert "no family of transformers has model.attention.kind=gated" in done.stderr


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_train_plan_and_resume_a_routing_variant(hlat, small, folder) -> None:
    relu = ("extensions=[relu_routing.py]", "model.mlp.kind=relu", "model.mlp.moe.num_experts=4")
    layouts = (["parallelism.ep=2", "parallelism.dp=2"], ["parallelism.tp=2"])
    for steps, layout in enumerate(layouts, 2):
        done = hlat("train", *small, *relu, "run.name=x", f"run.steps={steps}", *layout)
        assert done.returncode == 0, done.stderr
    assert "resuming from runs/x/checkpoints/step_00000002\n" in done.stdout
    rows = [json.loads(row) for row in (folder / "runs/x/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert 1 < row["router_experts_per_token"] < 3
        assert "router_entropy" not in row
    done = hlat("plan", *small, *relu, "json=true")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["active_parameters"] < plan["parameters"]
    done = hlat("train", *relu, "compiler=inductor", "model.mlp.moe.z_loss=0.1")
    assert done.returncode == 2
    assert "model.mlp.moe.z_loss has no effect with model.mlp.kind=relu" in done.stderr
    assert "model.mlp.kind=relu with compiler.torch_compile=true is not supported" in done.stderr


@pytest.mark.slow
def test_help_and_completion_have_the_kinds_and_settings(hlat, folder) -> None:
    done = hlat("train", GATED[0], "--help")
    assert "model.attention.kind: gated, softmax\n  model.attention.gated.scale\n" in done.stdout
    done = hlat("train", *GATED, "model.attention.gated.scale=0")
    assert done.returncode == 2
    assert done.stderr == "hlat: model.attention.gated.scale=0.0 is outside (0, inf)\n"
    typed = ["extensions", "=", "[gated_attention.py]", "model.attention.gated.s"]
    program = f"from hlat.config.completion import complete_override as c; print(c({typed}))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "['model.attention.gated.scale=']\n", done.stderr


@pytest.mark.slow
def test_a_precision_recipe_in_every_command(hlat, small, folder) -> None:
    recipe = ("extensions=[bf16_fp32_norm.py]", "precision=bf16_fp32_norm")
    done = hlat("train", recipe[0], "--help")
    assert "precision: bf16, bf16_fp32_norm, bf16_sr, " in done.stdout
    for steps in (1, 2):
        done = hlat("train", *small, *recipe, "run.name=x", f"run.steps={steps}")
        assert done.returncode == 0, done.stderr
    assert "resuming from runs/x/checkpoints/step_00000001\n" in done.stdout
    done = hlat("train", *small, recipe[1], "run.name=x", "run.steps=3")
    assert done.returncode == 2
    assert "one of an extension needs extensions=[FILE]" in done.stderr
    done = hlat("plan", *recipe)
    assert "tiny in bf16_fp32_norm on 1 node" in done.stdout, done.stderr
    choices = f"{recipe[1]},bf16_sr"
    sweep = (recipe[0], choices, "run.steps=1", "hydra.sweep.dir=runs/s")
    done = hlat("train", "-m", *small, *sweep)
    assert done.returncode == 0, done.stderr
    configs = (folder / "runs").glob("*/config.yaml")
    assert sum("  name: bf16_fp32_norm\n" in file.read_text() for file in configs) == 2


@pytest.mark.slow
def test_the_doctor_passes_a_precision_recipe(hlat, small, folder) -> None:
    data = [word for word in small if word.startswith("data.")]
    recipe = ("extensions=[bf16_fp32_norm.py]", "precision=bf16_fp32_norm")
    done = hlat("doctor", *data, *recipe)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_log_a_metric(hlat, small, folder) -> None:
    done = hlat(
        *("train", *small, "extensions=[attention_entropy.py,warmup_stable_invsqrt.py]"),
        *("tracking.metrics=[attention_entropy]", "tracking.metrics_every=2", "run.name=x"),
        *("schedule.name=invsqrt", "run.steps=2"),
    )
    assert done.returncode == 0, done.stderr
    first, second = map(json.loads, (folder / "runs/x/metrics.jsonl").read_text().splitlines())
    entropies = {key: value for key, value in second.items() if key.startswith("attention_entropy")}
    assert [*entropies] == ["attention_entropy/layer_0", "attention_entropy/layer_1"]
    assert all(value > 0 for value in entropies.values())
    assert not any(key.startswith("attention_entropy") for key in first)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "component", "layout"),
    [
        ("gated_attention", "attention.kind=gated", ["parallelism.tp=2", "precision=mixed"]),
        ("gated_attention", "attention.kind=gated", ["parallelism.zero=3", "parallelism.dp=2"]),
        (
            *("differential_attention", "attention.kind=differential"),
            ["parallelism.pp=2", "precision=bf16_sr"],
        ),
        (
            *("differential_attention", "attention.kind=differential"),
            ["parallelism.tp=2", "parallelism.dp=2"],
        ),
        (
            *("dynamic_tanh", "norm.kind=tanh"),
            ["parallelism.tp=2", "parallelism.sequence_parallel=true", "precision=mixed"],
        ),
        *(
            ("relu_routing", "mlp.kind=relu", [*ROUTED, *layout])
            for layout in (
                ["parallelism.tp=2", "model.mlp.moe.shared_size=48"],
                ["parallelism.ep=2", "parallelism.dp=2", "parallelism.zero=1"],
                ["parallelism.pp=2", "model.mlp.moe.every=2"],
            )
        ),
    ],
)
@pytest.mark.xdist_group("processes")
def test_the_doctor_passes_examples(hlat, small, folder, file, component, layout) -> None:
    data = [word for word in small if word.startswith("data.")]
    done = hlat("doctor", *data, f"extensions=[{file}.py]", f"model.{component}", *layout)
    assert done.returncode == 0, done.stdout + done.stderr
    section = f"model.{component.partition('.')[0]}"
    assert f"pass  backward        gradients with {section} are finite" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16_sr", "mixed"])
def test_the_doctor_passes_an_optimizer(hlat, small, folder, recipe) -> None:
    data = [word for word in small if word.startswith("data.")]
    cautious = ("extensions=[cautious_adamw.py]", "optimizer.name=cautious_adamw")
    done = hlat("doctor", *data, *cautious, f"precision={recipe}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pass  optimizer       updates are those of cautious AdamW in fp64 to " in done.stdout


@pytest.mark.parametrize(
    ("content", "section", "layout", "check", "part", "axis"),
    [
        (faulty_extensions.WRONG_BACKWARD, "mlp", [], "backward", "mlp", "model"),
        (faulty_extensions.LEAK, "attention", [], "causality", "", "model"),
        pytest.param(
            *(faulty_extensions.WRONG_SHARDING, "attention", ["parallelism.tp=2"]),
            *("gradients", "self_attn.head_scale", "tp"),
            marks=[pytest.mark.slow, pytest.mark.xdist_group("processes")],
        ),
        (
            *(faulty_extensions.EXPERT_CHOICE, "mlp", ["model.mlp.moe.num_experts=4"]),
            *("causality", "layer 0 mlp", "model"),
        ),
        (
            *(faulty_extensions.DETACHED_ROUTER, "mlp", ["model.mlp.moe.num_experts=4"]),
            *("backward", "mlp.gate.weight", "model"),
        ),
        pytest.param(
            *(faulty_extensions.WRONG_ROUTER_SHARDING, "mlp"),
            *(["model.mlp.moe.num_experts=4", "parallelism.tp=2"], "gradients"),
            *("mlp.gate.weight", "tp"),
            marks=[pytest.mark.slow, pytest.mark.xdist_group("processes")],
        ),
    ],
    ids=["backward", "leak", "sharding", "expert choice", "detached router", "router sharding"],
)
@pytest.mark.slow_after(1)
def test_the_doctor_names_a_fault(
    hlat, small, folder, content, section, layout, check, part, axis
) -> None:
    (folder / "idea.py").write_text(content)
    data = [word for word in small if word.startswith("data.")]
    done = hlat(
        *("doctor", *data, "extensions=[idea.py]", f"model.{section}.kind=fault", *layout),
        "run.name=x",
    )
    assert done.returncode == 3, done.stdout + done.stderr
    report = json.loads((folder / "runs/doctor/x/doctor.json").read_text())
    (found,) = [one for one in report["checks"] if one["check"] == check]
    assert found["status"] == "FAIL"
    assert found["culprits"][0]["axis"] == axis
    assert part in found["culprits"][0]["part"]
