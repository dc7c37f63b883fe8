"""The `hlat` command: help pages, dispatch and completion."""

import subprocess
import sys

import pytest

from hlat.__main__ import _COMMANDS, main
from hlat.config.completion import complete_override

COMMANDS = (
    *(
        "train",
        "sweep",
        "campaign",
        "prepare",
        "tokenizer",
        "plan",
        "doctor",
        "precompile",
        "report",
        "runs",
        "fit",
        "mixture",
        "generate",
        "serve",
        "evaluate",
    ),
    *("checkpoint", "average", "export", "jobs", "cluster"),
)


def test_help_fits_one_page_and_lists_every_command(capsys) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["--help"], prog_name="hlat")
    assert exited.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert tuple(_COMMANDS) == COMMANDS
    for name in COMMANDS:
        assert any(line.startswith(f"  {name} ") for line in lines), name


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(x, marks=() if x in ("train", "plan", "jobs") else pytest.mark.slow)
        for x in COMMANDS
    ],
)
def test_every_command_has_a_help_page_with_examples(hlat_command, command) -> None:
    done = hlat_command(command, "--help")
    assert done.returncode == 0, done.stderr
    assert "hlat" in done.stdout
    assert "example" in done.stdout or "hlat train  " in done.stdout


def test_an_unknown_command_is_an_error_that_suggests_the_nearest(hlat_command) -> None:
    done = hlat_command("trian")
    assert done.returncode == 2
    assert "trian is not a command; did you mean train?" in done.stderr


@pytest.mark.slow
def test_arguments_reach_the_command(hlat_command) -> None:
    done = hlat_command("train", "model=7b", "--cfg", "job")
    assert done.returncode == 0, done.stderr
    assert "hidden_size: 4096" in done.stdout
    assert hlat_command("train", "run.stps=3").returncode == 2


def test_sweep_is_train_with_multirun(hlat_command) -> None:
    done = hlat_command("sweep", "parallelism.tp=1,3")
    assert done.returncode == 2
    assert "parallelism.tp=3 does not divide" in done.stderr


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["mode"], {"model=", "model."}),
        (["model=7"], {"model=70b", "model=7b"}),
        (["model", "=", "7"], {"70b", "7b"}),
        (["run.steps=1", "optimizer.bet"], {"optimizer.beta1=", "optimizer.beta2="}),
        (["data.preview=1", "compiler.torch"], {"compiler.torch_compile="}),
        (["precision.rounding="], {"precision.rounding=nearest", "precision.rounding=stochastic"}),
        (["+sweep=bet"], {"+sweep=beta2"}),
        (["schedule.name=w"], {"schedule.name=wsd"}),
        (["model.attention.kind", "=", "s"], {"softmax"}),
        (["extensions=[nix.py]", "model.mlp.kind="], {"model.mlp.kind=dense"}),
        (["nothing.like"], set()),
        (["run.steps.x"], set()),
    ],
)
def test_overrides_are_completed(typed, expected) -> None:
    assert expected <= set(complete_override(typed))
    if not expected:
        assert complete_override(typed) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell, capsys) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["completion", shell], prog_name="hlat")
    assert exited.value.code == 0
    assert "_HLAT_COMPLETE" in capsys.readouterr().out


def test_the_shell_gets_completions(hlat_command) -> None:
    done = hlat_command(
        _HLAT_COMPLETE="bash_complete", COMP_WORDS="hlat train model=70", COMP_CWORD="2"
    )
    assert done.stdout.split() == ["plain,model=70b"]


@pytest.fixture
def hlat_command(tmp_path, monkeypatch):
    """Run `python -m hlat` in a temporary directory."""

    def run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        command = [sys.executable, "-m", "hlat", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    return run
