"""Validation loss of finished models: `hlat evaluate MODEL tasks=heldout`."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hlat import average, export
from hlat.evaluate import __main__ as evaluate
from tests.run.conftest import CommandResult, Runner, call_command


def call(folder: Path, *arguments: str) -> CommandResult:
    return call_command(evaluate.main, folder, arguments[0], "tasks=heldout", *arguments[1:])


def metrics(folder: Path, *arguments: str) -> dict[str, float]:
    """Return the metrics of an evaluation by name."""
    done = call(folder, *arguments, "json=true")
    assert done.code == 0, done.err
    path = next((argument for argument in arguments if argument.startswith("heldout=")), "")
    name = path.replace("=", ":") or "heldout"
    task = json.loads(done.out.splitlines()[-1])["tasks"][name]
    return {key.replace(f",{name}", ""): value for key, value in task["metrics"].items()}


def logged(runner: Runner, name: str, step: int) -> dict[str, Any]:
    rows = runner.rows(name, "events.jsonl")
    return next(row for row in rows if (row["event"], row["step"]) == ("evaluate", step))


def flatten(row: dict[str, Any]) -> dict[str, float]:
    return {
        f"{key},{name}": value
        for key in ("bits_per_byte", "loss")
        for name, value in row[key].items()
    }


@pytest.fixture
def folder(uninterrupted: Runner, tmp_path: Path) -> Path:
    """Return a folder with a copy of the small run."""
    shutil.copytree(uninterrupted.folder / "runs/whole", tmp_path / "runs/whole")
    return tmp_path


@pytest.mark.slow
def test_the_loss_equals_that_of_training(uninterrupted: Runner, folder: Path) -> None:
    assert metrics(folder, "runs/whole") == flatten(logged(uninterrupted, "whole", 20))
    row = json.loads((folder / "runs/whole/evaluations/step_00000020.json").read_text())
    assert row["tasks"]["heldout"]["questions"] == 6
    shown = call(folder, "runs/whole").out
    expected = logged(uninterrupted, "whole", 20)
    code, error = expected["bits_per_byte"]["code"], expected["stderr"]["code"]
    assert f"bits per byte: code {code:.4f} ± {error:.4f}, " in shown
    counts = [sum(expected[key].values()) for key in ("tokens", "bytes", "documents")]
    assert "{:,} tokens, {:,} bytes, {:,} documents; mean: equal weights".format(*counts) in shown


@pytest.mark.slow  # trains runs
@pytest.mark.parametrize(
    "overrides",
    [
        ("precision=bf16_sr", "data.document_mask=true", "data.loss_mask=true"),
        ("precision=mixed", "batch.micro_batch_size=null", "model.tie_embeddings=true"),
    ],
    ids=str,
)
def test_the_loss_equals_that_of_training_in_other_recipes(
    runner: Runner, overrides: tuple[str, ...]
) -> None:
    done = runner.run("run.name=x", "evaluation.every_steps=10", *overrides)
    assert done.returncode == 0, done.stderr
    for step in (10, 20):
        found = metrics(runner.folder, "runs/x", f"step={step}")
        assert found == flatten(logged(runner, "x", step))


@pytest.mark.slow  # evaluates several models
def test_averages_and_exports_are_evaluated_on_the_sets_of_a_run(
    uninterrupted: Runner, folder: Path
) -> None:
    assert call_command(average.main, folder, "runs/whole", "last=2", "output=mean").code == 0
    assert call_command(export.main, folder, "runs/whole", "output=exported_for_loss").code == 0
    expected = flatten(logged(uninterrupted, "whole", 20))
    assert metrics(folder, "exported_for_loss", "heldout=runs/whole") == pytest.approx(
        expected, rel=1e-5
    )
    mean = metrics(folder, "mean")
    assert mean.keys() == expected.keys()
    assert mean != expected
    assert mean == metrics(folder, "mean", "heldout=runs/whole")
    assert metrics(folder, "mean") == mean  # the scores are not part of the checkpoint


@pytest.mark.slow
def test_the_loss_on_other_text(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text("".join(f"The cat {i} sat. " * 20 for i in range(9)))
    found = metrics(folder, "runs/whole", f"heldout={file}")
    assert found.keys() == {
        f"{m},{n}" for m in ("bits_per_byte", "loss") for n in ("book.txt", "mean")
    }
    assert 1 < found["loss,mean"] < 12
    assert found != metrics(folder, "runs/whole", f"heldout={file}", "limit=1")


@pytest.mark.slow  # loads a model
def test_recorded_data_settings_can_be_overridden(folder: Path) -> None:
    arguments = ("runs/whole", "evaluation.sequences_per_source=1")
    fewer = metrics(folder, *arguments)
    assert fewer == metrics(folder, "runs/whole", "limit=1")
    assert fewer != metrics(folder, "runs/whole")
    done = call(folder, "runs/whole", "data.root=/nowhere")
    assert done.code == 2
    assert "data.sources.code.paths" in done.err


@pytest.mark.slow
def test_all_text_of_short_files_is_evaluated(folder: Path, tmp_path: Path) -> None:
    found = {}
    for size in (1, 128, 177):
        (tmp_path / "text.txt").write_bytes(b"\x01" * size)
        assert call(folder, "runs/whole", f"heldout={tmp_path}/text.txt").code == 0
        row = json.loads((folder / "runs/whole/evaluations/step_00000020.json").read_text())
        task = row["tasks"][f"heldout:{tmp_path}/text.txt"]
        assert task["bytes"] == {"text.txt": size}
        assert task["tokens"] == {"text.txt": size + 1}  # with EOS
        found[size] = task["metrics"]["loss,text.txt"]
        (folder / "runs/whole/evaluations/step_00000020.json").unlink()
    assert len(set(found.values())) == 3


def test_wrong_settings_are_reported(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    for arguments, message in {
        ("heldout=nowhere.jsonl",): "nowhere.jsonl: there is no such file or directory",
        (f"heldout={tmp_path}/empty.jsonl",): "its documents have no token; give more text",
        (
            f"heldout={tmp_path}/empty.jsonl",
            "data.heldout_documents=2",
        ): "data.heldout_documents=2 changes the data of a run",
        ("data.heldout_documents=x",): "its recorded data settings are invalid",
    }.items():
        done = call(folder, "runs/whole", *arguments)
        assert done.code == 2, arguments
        assert message in done.err
    done = call_command(evaluate.main, folder, "runs/whole", "tasks=hlat_cr", "heldout=x")
    assert done.code == 2
    assert "heldout= needs tasks=heldout" in done.err
