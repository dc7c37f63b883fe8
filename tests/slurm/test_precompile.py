"""A run on Trainium waits for the job that compiles it; a stand-in has the place of AWS's compiler."""

import sys

import pytest

from hlat import neuron_compile_cache
from tests.slurm.conftest import REPOSITORY, TWO_NODES

NXD = ("engine=nxd", "compiler=neuron_2_28")
ENGINES = (
    "engine:\n  name: nxd\n  device: xla",
    "engine:\n  name: native\n  device: cpu",
)
DISKS_OF_THEIR_OWN = """
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
"""What trains is the native engine: neuronx-distributed lies in another environment."""


@pytest.fixture
def compiler(login, tmp_path):
    """A login node, and nodes with disks of their own, that have the compiler."""
    tool = tmp_path / "bin/neuron_parallel_compile"
    tool.parent.mkdir()
    fake = (REPOSITORY / "tests/fakes/neuron_parallel_compile").read_text()
    tool.write_text(f"#!{sys.executable}\n{fake}")
    tool.chmod(0o755)
    (tmp_path / "sitecustomize.py").write_text(DISKS_OF_THEIR_OWN)
    environment = login.environment
    environment["PYTHONPATH"] += f":{tmp_path}"
    environment["PATH"] = f"{tool.parent}:{environment['PATH']}"
    environment["DISKS"] = str(tmp_path / "disks")
    environment["FAKE_SWAP"] = ">".join(ENGINES)
    return login


def modules(folder):
    return [
        neuron_compile_cache.is_module_complete(module)
        for module in neuron_compile_cache.list_modules(folder)
    ]


def times(login, submission, event):
    rows = login.rows("x", f"submissions/{submission}/attempts.jsonl")
    return [row["time"] for row in rows if row["event"] == event]


def test_nodes_compile_together_and_the_run_starts_when_they_have(whole, compiler, tmp_path):
    done = compiler.send("run.name=x", *TWO_NODES, *NXD)
    assert done.returncode == 0, done.stderr
    (before,) = compiler.rows("x", "submissions/1/receipts.jsonl")
    assert f"trains runs/x after compilation by job {before['job']}" in done.stdout
    assert f"job {before['job']} compiles before: " in compiler.jobs("runs/x")
    shown = compiler.wait_for("x", "COMPLETED", "FAILED", "CANCELLED", submission=2)
    assert shown["JobState"] == "COMPLETED", compiler.jobs("logs", "runs/x")
    assert times(compiler, 1, "end")[-1] < times(compiler, 2, "start")[0]
    for folder in ("runs/.compiled", "disks/n1", "disks/n2"):
        assert modules(tmp_path / folder) == [True] * 4
    assert compiler.losses("x") == whole.losses("whole")
    told = compiler.jobs("logs", "runs/x")
    words = ("modules are complete", "modules added", "complete at")
    assert sorted(words, key=told.rindex) == [*words]


def test_a_run_that_was_not_compiled_does_not_start_until_it_is(compiler):
    compiler.environment["FAKE_FAILS"] = "evaluate"
    del compiler.environment["FAKE_SWAP"]
    assert compiler.send("run.name=x", "run.steps=2", *NXD).returncode == 0
    compiler.wait_for("x", "CANCELLED", submission=2)
    assert compiler.jobs("runs/x").splitlines()[1].endswith("compiles before: FAILED")
    assert not times(compiler, 2, "start")
    del compiler.environment["FAKE_FAILS"]
    assert "after its compile job" in compiler.jobs("resubmit", "--failed", "runs/x")
    compiler.wait_for("x", "COMPLETED", "FAILED", "CANCELLED", submission=2)
    assert compiler.jobs("runs/x").splitlines()[1].split()[2] == "COMPLETED"
    assert "after its compile job" not in compiler.jobs("resubmit", "runs/x")
    shown = compiler.wait_for("x", "COMPLETED", "FAILED", "CANCELLED", submission=2)
    assert (shown["JobState"], len(times(compiler, 1, "start"))) == ("COMPLETED", 3)
