"""A run on Trainium starts after the job that compiles it; a fake compiler replaces that of AWS."""

import sys

import pytest

from hlat.engine.neuron import neuron_compile_cache
from tests.run.conftest import REPOSITORY
from tests.slurm.conftest import TWO_NODES

NXD = ("engine=nxd", "compiler=neuron_2_28")
ENGINES = (
    "engine:\n  name: nxd\n  device: xla",
    "engine:\n  name: native\n  device: cpu",
)
SEPARATE_DISKS = """
import os
if node := os.environ.get("SLURMD_NODENAME"):
    os.environ["NEURON_COMPILE_CACHE_URL"] = os.environ["DISKS"] + "/" + node
if "RANK" in os.environ:
    from hlat.engine import engine_factory
    from hlat.engine.native.native_engine import NativeEngine
    def on_cpu(config):
        config.engine.device = "cpu"
        return NativeEngine()
    engine_factory.create_engine = on_cpu
"""
"""The native engine trains, as neuronx-distributed is installed in another environment."""


@pytest.fixture
def compiler(login, tmp_path):
    """Return a login node with the compiler; each node has a separate disk."""
    tool = tmp_path / "bin/neuron_parallel_compile"
    tool.parent.mkdir()
    fake = (REPOSITORY / "tests/fakes/neuron_parallel_compile").read_text()
    tool.write_text(f"#!{sys.executable}\n{fake}")
    tool.chmod(0o755)
    login.inject(SEPARATE_DISKS)
    environment = login.environment
    environment["PATH"] = f"{tool.parent}:{environment['PATH']}"
    environment["DISKS"] = str(tmp_path / "disks")
    environment["NEURON_FAKE_SWAP"] = ">".join(ENGINES)
    return login


def modules(folder):
    return [
        neuron_compile_cache.is_module_complete(module)
        for module in neuron_compile_cache.list_modules(folder)
    ]


def list_times(login, submission, event):
    rows = login.rows("x", f"submissions/{submission}/attempts.jsonl")
    return [row["time"] for row in rows if row["event"] == event]


@pytest.mark.slow  # tests/run/test_precompile.py compiles without Slurm
@pytest.mark.parametrize("nodes", [1, 2])
def test_compile_on_all_nodes_before_the_run_starts(compiler, uninterrupted, tmp_path, nodes):
    done = compiler.send("run.name=x", *(TWO_NODES if nodes == 2 else ()), *NXD)
    assert done.returncode == 0, done.stderr
    (before,) = compiler.rows("x", "submissions/1/receipts.jsonl")
    assert f"trains runs/x after compilation by job {before['job']}" in done.stdout
    assert f"job {before['job']} compiles before: " in compiler.jobs("runs/x")
    shown = compiler.wait_for("x", "COMPLETED", "FAILED", "CANCELLED", submission=2)
    assert shown["JobState"] == "COMPLETED", compiler.jobs("logs", "runs/x")
    assert list_times(compiler, 1, "end")[-1] < list_times(compiler, 2, "start")[0]
    for folder in ("runs/.compiled", *(f"disks/n{i + 1}" for i in range(nodes))):
        complete = modules(tmp_path / folder)
        assert complete
        assert all(complete)
    for row, expected in zip(compiler.losses("x"), uninterrupted.losses("whole"), strict=True):
        assert row == pytest.approx(expected, rel=1e-5)
    printed = compiler.jobs("logs", "runs/x")
    messages = ("modules are complete", "modules added", "complete at")
    assert sorted(messages, key=printed.rindex) == [*messages]


@pytest.mark.slow  # a compilation that succeeds runs before the run above
def test_cancel_the_run_if_its_compilation_fails_and_resubmit_both(compiler):
    compiler.environment["NEURON_FAKE_FAILS"] = "evaluate"
    del compiler.environment["NEURON_FAKE_SWAP"]
    assert compiler.send("run.name=x", "run.steps=2", *NXD).returncode == 0
    compiler.wait_for("x", "CANCELLED", submission=2)
    assert compiler.jobs("runs/x").splitlines()[1].endswith("compiles before: FAILED")
    assert not list_times(compiler, 2, "start")
    del compiler.environment["NEURON_FAKE_FAILS"]
    assert "after its compile job" in compiler.jobs("resubmit", "--failed", "runs/x")
    compiler.wait_for("x", "COMPLETED", "FAILED", "CANCELLED", submission=2)
    assert compiler.jobs("runs/x").splitlines()[1].split()[2] == "COMPLETED"
    assert "after its compile job" not in compiler.jobs("resubmit", "runs/x")
    shown = compiler.wait_for("x", "COMPLETED", "FAILED", "CANCELLED", submission=2)
    assert (shown["JobState"], len(list_times(compiler, 1, "start"))) == ("COMPLETED", 3)


@pytest.mark.slow  # waits for Slurm
def test_each_point_of_an_array_waits_for_its_compilation(compiler):
    """Make both compilations fail, then succeed."""
    compiler.environment["NEURON_FAKE_FAILS"] = "evaluate"
    del compiler.environment["NEURON_FAKE_SWAP"]
    done = compiler.send("-m", "run.name=x,y", "run.steps=2", *NXD)
    assert done.returncode == 0, done.stderr

    def states() -> list[str]:
        return [line.split()[2] for line in compiler.jobs("runs").splitlines()[1:]]

    compiler.cluster.wait_until(200, "both fail", lambda: states() == ["CANCELLED"] * 2)
    assert not list_times(compiler, 2, "start")
    del compiler.environment["NEURON_FAKE_FAILS"]
    assert compiler.jobs("resubmit", "failed=true").count("after its compile job") == 2
    compiler.cluster.wait_until(200, "both end", lambda: states() == ["COMPLETED"] * 2)
    assert list_times(compiler, 1, "end")[-1] < list_times(compiler, 2, "start")[0]
