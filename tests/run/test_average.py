"""Averages of the checkpoints of a run, their export, and training from it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hlat import average, export
from hlat.checkpoint import __main__ as checkpoint
from hlat.checkpoint import checkpoint_store
from tests.run.conftest import call_command

MEAN = "runs/whole/averages/step_00000020_of_15_20"


@pytest.fixture
def trained(runner, uninterrupted):
    """Copy the small run with checkpoints of steps 10, 15 and 20."""
    shutil.copytree(uninterrupted.folder / "runs/whole", runner.folder / "runs/whole")


@pytest.fixture
def do(runner):
    """Run a command in this process, in the runner's folder."""
    return lambda entry, *arguments: call_command(entry.main, runner.folder, *arguments)


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    found = load_file(folder / f"runs/whole/checkpoints/step_{step:08}/rank_00000.safetensors")
    return {n.removeprefix("weights/"): v for n, v in found.items() if n.startswith("weights/")}


@pytest.mark.slow  # 4 s
def test_average_export_and_train(trained, runner, do):
    done = do(average, "runs/whole", "last=2")
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        "runs/whole/checkpoints/step_00000015  weight 1",
        "runs/whole/checkpoints/step_00000020  weight 1",
        f"averaged to {MEAN}",
        f"export it:  hlat export {MEAN} output=DIR",
    ]
    done = do(export, MEAN, "--output", "out")
    assert done.code == 0, done.err
    written = load_file(runner.folder / "out/model.safetensors")
    one, two = (weights(runner.folder, step) for step in (15, 20))
    assert written.keys() == one.keys()
    for name, values in written.items():
        expected = ((one[name].double() + two[name].double()) / 2).float()
        assert torch.equal(values, expected), name
    first = runner.run("run.name=y", "model.init_from=out", "run.steps=1")
    assert first.returncode == 0, first.stderr


def test_list_the_average_and_do_not_resume_from_it(trained, runner, do):
    one, two = (weights(runner.folder, step)["lm_head.weight"].double() for step in (10, 20))
    assert do(average, "runs/whole", "steps=20,10", "weights=3,1", "--dtype", "bf16").code == 0
    found = json.loads(do(checkpoint, "ls", "runs/whole", "--json").out)
    path = "runs/whole/averages/step_00000020_of_10x1_20x3_bf16"
    (mean,) = [entry for entry in found if entry["path"] == path]
    assert (mean["kind"], mean["state"], mean["step"]) == ("weights only", "committed", 20)
    assert do(checkpoint, "verify", "runs/whole").code == 0
    again = runner.run("run.name=whole", "schedule.total_steps=22")
    assert again.returncode == 0, again.stderr
    assert "resuming from runs/whole/checkpoints/step_00000020" in again.stdout
    values = load_file(runner.folder / path / "rank_00000.safetensors")["weights/lm_head.weight"]
    assert torch.equal(values, ((one + 3 * two) / 4).bfloat16())


@pytest.mark.slow  # one or more whole processes
def test_refuse_to_start_from_an_average(trained, runner, do, refused):
    assert do(average, "runs/whole", "last=2").code == 0
    sentence = (
        f"hlat: cannot start from checkpoint.start_from at {MEAN}: it contains weights only, and a "
        "run also needs the optimizer state and the position in the data; to start a new run from "
        f"the weights: hlat export {MEAN} output=DIR, then model.init_from=DIR instead of "
        "checkpoint.start_from\n"
    )
    refused(runner.run("run.name=y", f"checkpoint.start_from={MEAN}"), sentence)
    refused(
        runner.run("run.name=y", f"model.init_from={MEAN}"),
        f"hlat: model.init_from={MEAN}: it is a checkpoint of hlat; export its weights "
        f"first with hlat export {MEAN} output=DIR, then set model.init_from=DIR\n",
    )


@pytest.mark.slow
def test_refuse_to_average_a_damaged_checkpoint(trained, runner, do):
    path = runner.folder / "runs/whole/checkpoints/step_00000015/rank_00000.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    done = do(average, "runs/whole", "last=2")
    assert done.code == 2
    (sentence,) = [line for line in done.err.splitlines() if not line.startswith("verifying: ")]
    assert sentence.startswith(
        "hlat: runs/whole/checkpoints/step_00000015/rank_00000.safetensors differs"
    )
    assert not (runner.folder / "runs/whole/averages").exists()


MISTAKES = [
    (("rnus", "last=2"), "hlat: rnus does not exist; specify a run directory, such as runs\n"),
    (("runs/whole",), "hlat average: give either last=N or steps=A,B to select checkpoints\n"),
    (
        ("runs/whole", "last=2", "steps=5,10"),
        "hlat average: give either last=N or steps=A,B to select checkpoints\n",
    ),
    (("runs/whole", "last=1"), "hlat average: an average needs two checkpoints or more\n"),
    (
        ("runs/whole", "lats=2"),
        "hlat average: lats= is not a setting of this command; did you mean last=?\n",
    ),
    (
        ("runs/whole", "steps=5,x"),
        "hlat average: steps: x is not a whole number of 1 or more\n",
    ),
    (
        ("runs/whole", "steps=5,5"),
        "hlat average: steps=5,5 has a step twice; use weights= instead\n",
    ),
    (
        ("runs/whole", "last=2", "weights=1,2,3"),
        "hlat average: weights= has 3 numbers for 2 checkpoints\n",
    ),
    (
        ("runs/whole", "last=2", "weights=1,nan"),
        "hlat average: weights: nan is not a number above zero, of 1e+06 or less\n",
    ),
    (
        ("runs/whole", "steps=15,17"),
        "hlat: steps=17: runs/whole has no such checkpoint, only 10, 15, 20\n",
    ),
    (("runs/whole", "last=4"), "hlat: last=4: runs/whole has only 3 checkpoints: 10, 15, 20\n"),
    (
        ("runs/whole", "last=2", "--output", "runs"),
        "hlat: output=runs exists already; specify a new directory, or remove it\n",
    ),
    (
        ("runs/whole", "last=2", "--outptu", "x"),
        "hlat average: unrecognized arguments: --outptu x; did you mean output=?\n",
    ),
    (
        ("runs", "last=2"),
        "hlat: runs contains no checkpoint; specify a run directory, such as runs/<run.name>, that has saved, "
        "or one of its checkpoints\n",
    ),
]


def test_refuse_mistakes_in_one_sentence(trained, runner, do):
    for arguments, sentence in MISTAKES:
        done = do(average, *arguments)
        assert (done.code, done.err) == (2, sentence), arguments
    assert not (runner.folder / "runs/whole/averages").exists()


@pytest.mark.slow
def test_no_files_remain_after_an_interrupt(trained, runner, do, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_store, "commit_checkpoint", interrupt)
    done = do(average, "runs/whole", "last=2")
    assert done.code == 130
    assert done.err.endswith("\nhlat: interrupted; no part of the average was written\n")
    assert not (runner.folder / "runs/whole/averages").exists()


def test_fail_when_the_output_is_not_writable(trained, runner, do):
    done = do(average, "runs/whole", "last=2", "--output", "/proc/nowhere/mean")
    assert done.code == 2
    sentence = (
        "hlat: /proc/nowhere/mean cannot be written: /proc/nowhere: No such file or directory; "
        "specify a path that you can read and write"
    )
    assert done.err.splitlines()[-1] == sentence
