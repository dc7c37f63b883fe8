"""An unhealthy node ends a run before its first step, with its name and exit code 4."""

import os
import shutil

import pytest

from hlat.engine import device_checks
from hlat.recovery import host_info, preflight

WRONG_ON_ONE_RANK = """
import os
if os.environ.get("RANK") == "1":
    from hlat.engine import device_checks
    multiply = device_checks._matmul
    device_checks._matmul = lambda one, other: multiply(one, other).clamp(max=3)
"""


@pytest.fixture
def wrong_device(monkeypatch):
    """Simulate a device with one wrong element in every matmul, on a node called trn-7."""

    def product(one, other):
        result = one @ other
        result[-1, -1] += 1
        return result

    monkeypatch.setattr(device_checks, "_matmul", product)
    monkeypatch.setattr(host_info, "get_host_name", lambda: "trn-7")


def test_end_a_run_with_wrong_arithmetic_and_name_the_node(runner, wrong_device):
    done = runner.run("run.name=x")
    assert done.returncode == 4
    lines = [line for line in done.stderr.splitlines() if "trn-7" in line]
    assert len(lines) == 1
    assert lines[0].startswith("hlat: node trn-7 is unhealthy: rank 0: ")
    assert lines[0].endswith("exclude it and start the same command again")
    assert "Traceback" not in done.stderr
    first, second = runner.rows("x", "events.jsonl")
    assert first["failed"][0]["check"] == "arithmetic"
    assert (second["event"], second["host"], second["ranks"]) == ("exclude", "trn-7", [0])
    assert "wrong elements in" in second["reasons"][0]
    assert not runner.rows("x", "metrics.jsonl")


def test_train_with_the_same_command_on_a_healthy_node(
    runner, wrong_device, monkeypatch, uninterrupted
):
    assert runner.run("run.name=x").returncode == 4
    monkeypatch.undo()
    assert runner.run("run.name=x").returncode == 0
    assert runner.losses("x") == uninterrupted.losses("whole")


@pytest.mark.slow
def test_train_without_preflight_checks(runner, wrong_device):
    assert runner.run("run.name=x", "run.steps=1", "recovery.preflight=false").returncode == 0
    assert runner.rows("x", "events.jsonl")[0]["event"] == "start"


@pytest.mark.slow
def test_refuse_a_disk_for_less_than_two_checkpoints(runner, refused, monkeypatch):
    runner.run("run.name=x", "run.steps=1", "recovery.preflight=false")
    size = sum(f.stat().st_size for f in runner.folder.glob("runs/x/checkpoints/*/*.safetensors"))
    usage = shutil.disk_usage("/")._replace(free=int(1.5 * size))
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: usage)
    refused(
        runner.run("run.name=y"),
        "two checkpoints take 0.01; free some, or set run.root or checkpoint.destination to a larger disk",
    )
    # with one checkpoint on the disk, space for one more is sufficient
    assert runner.run("run.name=x", "run.steps=2").returncode == 0


@pytest.mark.slow  # tests/distributed/test_preflight.py: the checks of several ranks
@pytest.mark.distributed
@pytest.mark.xdist_group("processes")
def test_end_all_processes_with_the_exit_code_of_one(runner, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WRONG_ON_ONE_RANK)
    runner.environment["PYTHONPATH"] += os.pathsep + str(tmp_path)
    runner.environment["SLURMD_NODENAME"] = "trn-7"
    done = runner.run_process("run.name=x", "parallelism.dp=2")
    assert done.returncode == 4, done.stderr
    assert done.stderr.count("hlat: node trn-7 is unhealthy: rank 1: ") == 1
    assert "Traceback" not in done.stderr
    event = runner.rows("x", "events.jsonl")[-1]
    assert (event["event"], event["host"], event["ranks"]) == ("exclude", "trn-7", [1])
