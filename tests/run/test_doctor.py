"""`python -m hlat.doctor` as users meet it."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.xdist_group("processes")


@pytest.fixture
def words(small):
    return [word for word in small if word.startswith("data.")]


def test_a_healthy_run_is_told_so(hlat, words, tmp_path) -> None:
    done = hlat("doctor", *words, "parallelism.tp=2", "precision=mixed", "run.name=x")
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert last.startswith("healthy; ")
    record = json.loads((tmp_path / "runs/doctor/x/doctor.json").read_text())
    assert record["healthy"]
    assert record["num_processes"] == 2
    assert [one["check"] for one in record["checks"]] == [line[6:21].strip() for line in lines]
    assert {one["status"] for one in record["checks"]} == {"pass", "n/a"}
    assert not (tmp_path / "runs/x").exists()


def test_mistakes_are_told_as_train_tells_them(hlat) -> None:
    done = hlat("doctor", "modle=7b")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "hlat: modle is not a key of the configuration; did you mean model?\n"


def test_data_that_are_not_here_are_no_fault(hlat, words, tmp_path) -> None:
    done = hlat("doctor", *words, f"data.root={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.split()[1] == "data"]
    assert line.startswith("n/a   data            data.sources.")


def test_help_needs_no_configuration(hlat) -> None:
    done = hlat("doctor", "--help")
    assert done.returncode == 0
    assert "Exit codes: 0 healthy" in done.stdout


def test_it_is_no_entry_that_a_launcher_sends(hlat) -> None:
    done = hlat("doctor", "hydra/launcher=slurm")
    assert done.returncode == 2
    assert "runs hlat.train, not hlat.doctor" in done.stderr


def test_a_reader_who_leaves_ends_nothing(words, tmp_path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "hlat.doctor", *words, "run.name=x"],
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
