"""`python -m hlat.precompile` with a fake of AWS's tool, which runs the real training."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hlat import precompile
from hlat.config import entry_point, frozen_config, resolve
from hlat.engine import graph_extraction
from hlat.engine.neuron import neuron_compile_cache
from tests.run.conftest import PYTHONPATH

REPOSITORY = Path(__file__).resolve().parent.parent.parent
FAKE = REPOSITORY / "tests/fakes/neuron_parallel_compile"


class Done:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the cache of this node, with the fake tool on the PATH."""
    tool = tmp_path / "bin/neuron_parallel_compile"
    tool.parent.mkdir()
    tool.write_text(f"#!{sys.executable}\n{FAKE.read_text()}")
    tool.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def do(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run the entry in this process."""

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["hlat.precompile", *arguments])
        code = 0
        try:
            precompile.main()
        except SystemExit as end:
            code = int(end.code or 0)
        result = capfd.readouterr()
        return Done(code, result.out, result.err)

    return run


@pytest.mark.slow
def test_compile_verify_and_reuse_the_cache(cache: Path, do: Callable[..., Done]) -> None:
    first = do("engine=nxd")
    assert first.code == 0, first.err
    assert f"{cache}: 4 of 4 modules are complete" in first.out
    neffs = {path: path.stat().st_mtime_ns for path in cache.rglob("model.neff")}
    assert do("engine=nxd", "optimizer.lr=1e-5").code == 0
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("model.neff")} == neffs
    assert [path.name for path in Path("runs").iterdir()] == [".compiled"]


def test_merge_modules_of_another_node(
    cache: Path, do: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    do("engine=nxd")
    shutil.rmtree(cache)
    monkeypatch.setenv("NEURON_FAKE_FAILS", "train")
    done = do("engine=nxd")
    assert done.code == 0, done.err
    assert f"{cache}: 4 modules added, 0 already present" in done.out


@pytest.mark.slow  # one or more whole processes
def test_print_failed_modules_and_compile_them_again(
    cache: Path, do: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_FAKE_FAILS", "evaluate")
    failed = do("engine=nxd")
    assert failed.code == 1
    assert "failed to compile:\n    Failed compilation\n    NCC_EXSP001: out of SBUF" in failed.err
    assert "3 of 4 modules are complete" in failed.out
    assert do("verify").code == 1
    monkeypatch.delenv("NEURON_FAKE_FAILS")
    again = do("engine=nxd")
    assert again.code == 0
    assert "is incomplete after an earlier attempt" in again.out


@pytest.mark.slow
def test_remove_the_lock_of_a_killed_compiler(cache: Path, do: Callable[..., Done]) -> None:
    do("engine=nxd")
    module = neuron_compile_cache.list_modules(cache)[0]
    (module / "model.done").unlink()
    (module / "model.hlo_module.pb.lock").touch()
    assert do("engine=nxd").code == 0
    assert neuron_compile_cache.is_module_complete(module)


@pytest.mark.slow
def test_trace_a_run_and_keep_no_files(
    cache: Path,
    do: Callable[..., Done],
    small: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    engines = ("engine:\n  name: nxd\n  device: xla", "engine:\n  name: native\n  device: cpu")
    monkeypatch.setenv("NEURON_FAKE_SWAP", ">".join(engines))
    monkeypatch.setenv("NEURON_FAKE_KEEP", str(tmp_path / "kept"))
    typed = ["run.name=mine", "run.steps=9", "checkpoint.every_steps=1", "recovery.preflight=true"]
    done = do(*small, "engine=nxd", *typed, f"checkpoint.destination={tmp_path}/elsewhere")
    assert done.code == 0, done.out + done.err
    assert [path.name for path in Path("runs").iterdir()] == [".compiled"]
    assert not (tmp_path / "elsewhere").exists()
    run = tmp_path / "kept/traced"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    steps = [(row["event"], row["step"]) for row in events]
    assert [step for kind, step in steps if kind == "evaluate"] == [0, 2, 4]
    assert steps[-1] == ("finish", 4)
    judged = {"preflight", "checkpoint", "checkpoint_failed", "spike", "skip"}
    assert not judged & {kind for kind, _ in steps}
    assert not [*run.glob("checkpoints/*")]


@pytest.mark.slow  # one or more whole processes
def test_ignore_metrics_of_a_traced_run(runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept metrics that are not finite, which are common in a traced run."""
    arguments = ["run.steps=4", "optimizer.lr=1e30", "schedule.warmup_steps=0"]
    arguments += ["recovery.rollback_after=1", "recovery.spike_window=2"]
    codes = {}
    for traced in ("", "1"):
        monkeypatch.setenv("NEURON_EXTRACT_GRAPHS_ONLY", traced)
        codes[traced] = runner.run(f"run.name=x{traced}", *arguments).returncode
    assert codes == {"": 3, "1": 0}


@pytest.mark.slow
def test_merge_into_the_cache_of_a_node(cache: Path, do: Callable[..., Done]) -> None:
    do("engine=nxd")
    shared = cache.parent / "shared"
    done = do("merge", str(cache), "--into", str(shared))
    assert (done.code, done.out) == (0, f"{shared}: 4 modules added, 0 already present\n")
    shutil.rmtree(cache)
    assert do("merge", str(shared)).code == 0
    done = do("verify")
    assert (done.code, done.out) == (0, f"{cache}: 4 of 4 modules are complete\n")
    assert do("merge", str(shared)).out == f"{cache}: 0 modules added, 4 already present\n"


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ("", "engine.name=native compiles no graphs ahead of a run; set engine=nxd"),
        ("engine=nxd modle=7b", "did you mean model?"),
        ("engine=nxd compiler.neuron_sdk=2.28 compiler.cc_flags=[--cache_dir=/x]", "--cache_dir"),
        ("experiment=hlat_7b hardware.nodes=2", "with srun --nodes=2 --ntasks-per-node=1"),
        ("merge", "merge needs one directory or more"),
        ("merge nowhere", "nowhere has no neuronxcc-*/MODULE_*"),
        ("verify a b", "verify takes one directory"),
    ],
)
def test_refuse_mistakes(cache: Path, do: Callable[..., Done], arguments: str, result: str) -> None:
    done = do(*arguments.split())
    assert done.code == 2
    assert result in done.err
    assert "Traceback" not in done.err


def test_fail_when_a_directory_is_not_writable(cache: Path, do: Callable[..., Done]) -> None:
    do("engine=nxd")
    Path("file").touch()
    done = do("merge", str(cache), "--into", "file/all")
    assert done.code == 2
    assert done.err.splitlines()[-1].startswith("hlat: file/all/.merging: Not a directory; specify")
    done = do("engine=nxd", "run.root=file/runs")
    assert done.code == 1
    assert "Not a directory" in done.err


@pytest.mark.slow
def test_fail_when_tracing_fails(
    cache: Path, do: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_FAKE_SWAP", "engine:>engines:")
    done = do("engine=nxd")
    assert done.code == 1
    assert "hlat: neuron_parallel_compile --command collect exited with 1" in done.err
    assert not cache.exists()


def test_refuse_without_the_compiler(
    cache: Path, do: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    done = do("engine=nxd")
    assert done.code == 2
    assert done.err == (
        "hlat: neuron_parallel_compile is not on the PATH; activate an environment with "
        "torch-neuronx\n"
    )


def test_verify_an_empty_cache(cache: Path, do: Callable[..., Done]) -> None:
    done = do("verify")
    assert (done.code, done.out) == (2, "")
    assert f"{cache} is not a directory of compiled graphs" in done.err
    cache.mkdir(parents=True)
    done = do("verify")
    assert (done.code, done.out) == (1, f"{cache}: 0 of 0 modules are complete\n")


@pytest.mark.slow
def test_verify_without_importing_torch(cache: Path, tmp_path: Path) -> None:
    refuse = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'torch', 'pyarrow', 'tokenizers', 'numpy'}:\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
    )
    (tmp_path / "sitecustomize.py").write_text(refuse)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    refused = ["engine=nxd", "engine.device=cpu"]
    for arguments, code in ((["--help"], 0), (["verify"], 2), (refused, 2), (["model=7b"], 2)):
        command = [sys.executable, "-m", "hlat.precompile", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == code, done.stderr


def test_trace_with_the_processes_of_all_nodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compose
) -> None:
    """Start the processes of each node as a job does, in a shared folder."""
    slurm = {"PROCID": "3", "NTASKS": "64", "LOCALID": "0", "JOB_ID": "17", "STEP_ID": "2"}
    for name, value in (slurm | {"STEP_NODELIST": "trn-[001-064]"}).items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(entry_point, "get_task_overrides", lambda: ["experiment=hlat_7b"])
    composed = compose("experiment=hlat_7b", f"run.root={tmp_path}")
    config = resolve.resolve_config(composed)
    with precompile._build_traced_command(config, composed) as arguments:
        assert arguments[1:4] == ["-m", "hlat.train", frozen_config.FROZEN_FLAG]
        traced = frozen_config.load_frozen_config(Path(arguments[4]))
    assert traced.run.root == str(tmp_path / ".traced-trn-001-20017")
    assert (traced.run.steps, composed.run.steps) == (4, None)
    assert graph_extraction.build_node_environment(config) == {
        "HLAT_NODES": "64",
        "HLAT_NODE": "3",
        "HLAT_RDZV_ENDPOINT": "trn-001:20017",
    }
    monkeypatch.setenv("HLAT_RDZV_ENDPOINT", "host:1")
    assert graph_extraction.build_node_environment(config) == {}
