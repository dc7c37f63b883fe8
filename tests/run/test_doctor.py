"""`python -m hlat.doctor` on healthy and on invalid configurations."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest

from hlat.doctor.__main__ import run_doctor
from tests.conftest import REPOSITORY

TWO_PROCESSES = ["parallelism.tp=2", "precision=mixed"]


@pytest.fixture
def arguments(small):
    return [argument for argument in small if argument.startswith("data.")]


@pytest.fixture
def doctor(runner) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Run hlat.doctor in this process."""
    return lambda *overrides: runner.run(*overrides, small=False, task=run_doctor)


@pytest.mark.parametrize(
    "layout",
    [
        ["precision=mixed"],
        pytest.param(TWO_PROCESSES, marks=[pytest.mark.slow, pytest.mark.xdist_group("processes")]),
    ],
)
def test_report_a_healthy_run(doctor, hlat, arguments, tmp_path, layout) -> None:
    command = partial(hlat, "doctor") if layout == TWO_PROCESSES else doctor
    done = command(*arguments, *layout, "run.name=x")
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert last.startswith("healthy; ")
    record = json.loads((tmp_path / "runs/doctor/x/doctor.json").read_text())
    assert record["healthy"]
    assert record["num_processes"] == (2 if layout == TWO_PROCESSES else 1)
    assert [one["check"] for one in record["checks"]] == [line[6:21].strip() for line in lines]
    assert {one["status"] for one in record["checks"]} == {"pass", "n/a"}
    assert not (tmp_path / "runs/x").exists()


@pytest.mark.slow
def test_refuse_mistakes_with_the_message_of_train(doctor) -> None:
    done = doctor("modle=7b")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "hlat: modle is not a key of the configuration; did you mean model?\n"


@pytest.mark.slow
def test_missing_data_are_not_a_failure(doctor, arguments, tmp_path) -> None:
    done = doctor(*arguments, f"data.root={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.split()[1] == "data"]
    assert line.startswith("n/a   data            data.sources.")


def test_print_help_without_a_configuration(hlat) -> None:
    done = hlat("doctor", "--help")
    assert done.returncode == 0
    assert "Exit codes: 0 healthy" in done.stdout


@pytest.mark.slow
def test_refuse_a_launcher(hlat) -> None:
    done = hlat("doctor", "hydra/launcher=slurm")
    assert done.returncode == 2
    assert "runs hlat.train, not hlat.doctor" in done.stderr


@pytest.mark.slow
def test_check_on_after_the_reader_of_stdout_has_left(arguments, tmp_path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "hlat.doctor", *arguments, "run.name=x"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("pass  machine")
        process.stdout.close()
        assert (process.wait(), process.stderr.read()) == (0, "")
    assert json.loads((tmp_path / "runs/doctor/x/doctor.json").read_text())["healthy"]
