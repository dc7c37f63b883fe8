"""Run hlat and compare the order of calls with the paths of docs/architecture.md."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
TRACED = Path(__file__).with_name("traced")


def _load_drawing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw", REPOSITORY / "docs/draw_diagrams.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DRAWING = _load_drawing()
PATHS: dict[str, list[tuple[str, str]]] = DRAWING.parse_paths(DRAWING.PAGE.read_text())


class Tracer:
    """Runner of hlat commands that records the calls of the functions of a path."""

    def __init__(self, folder: Path, small: list[str], path: list[tuple[str, str]]) -> None:
        self.folder, self.small = folder, small
        self.path = [(str(REPOSITORY / f"{m}.py"), name.rpartition(".")[2]) for name, m in path]
        self.output, settings = folder / "calls", folder / "trace.json"
        functions = {file: [n for f, n in self.path if f == file] for file, _ in self.path}
        settings.write_text(json.dumps({"output": str(self.output), "functions": functions}))
        self.environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(TRACED)]),
            "HLAT_TEST_TRACE": str(settings),
        }

    def run(self, *arguments: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "hlat", *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr

    def assert_order(self) -> None:
        """Assert that the calls contain the path as a subsequence."""
        rows = sorted(
            (int(time), file, name)
            for time, file, name in map(str.split, self.output.read_text().splitlines())
        )
        calls = iter([(file, name) for _, file, name in rows])
        for number, step in enumerate(self.path, 1):
            assert step in calls, f"{number}. {step[1]} was not reached after the steps before it"


@pytest.fixture
def tracer(request: pytest.FixtureRequest, tmp_path: Path, small: list[str]) -> Tracer:
    return Tracer(tmp_path, small, PATHS[request.param])


def test_there_are_five_paths() -> None:
    assert {title: len(path) for title, path in PATHS.items() if len(path) < 8} == {}
    assert list(PATHS) == [
        "One step",
        "One save",
        "One restart",
        "One sweep",
        "One checkpoint across layouts",
    ]


def test_diagrams_are_up_to_date() -> None:
    files = {path.name: path.read_text() for path in DRAWING.DIAGRAMS.iterdir()}
    assert files == DRAWING.draw_all(), "run python docs/draw_diagrams.py"


@pytest.mark.slow  # traces every call of a run
@pytest.mark.parametrize("tracer", ["One step"], indirect=True)
def test_one_step(tracer: Tracer) -> None:
    tracer.run("train", *tracer.small, "run.name=x", "run.steps=1")
    tracer.assert_order()


@pytest.mark.slow
@pytest.mark.parametrize("tracer", ["One save"], indirect=True)
def test_one_save(tracer: Tracer) -> None:
    tracer.run("train", *tracer.small, "run.name=x", "run.steps=2", "checkpoint.every_steps=1")
    tracer.assert_order()


@pytest.mark.slow
@pytest.mark.parametrize("tracer", ["One restart"], indirect=True)
def test_one_restart(tracer: Tracer) -> None:
    # The first worker is killed after it has committed the checkpoint of step 1
    tracer.environment["HLAT_TEST_KILL"] = f"prune_checkpoints:{tracer.folder / 'killed'}"
    tracer.run(
        *("train", *tracer.small, "run.name=x", "run.steps=2", "checkpoint.every_steps=1"),
        "recovery=hlat",
    )
    assert (tracer.folder / "killed").exists()
    tracer.assert_order()


@pytest.mark.slow
@pytest.mark.parametrize("tracer", ["One sweep"], indirect=True)
def test_one_sweep(tracer: Tracer) -> None:
    sweep = "hydra.sweep.dir=runs/sweeps/x"
    tracer.run("sweep", *tracer.small, "optimizer.lr=1e-3,2e-3", "run.steps=1", sweep)
    tracer.run("report", "runs/sweeps/x")
    tracer.assert_order()


@pytest.mark.slow
@pytest.mark.parametrize("tracer", ["One checkpoint across layouts"], indirect=True)
def test_one_checkpoint_across_layouts(tracer: Tracer) -> None:
    tracer.run("train", *tracer.small, "run.name=x", "run.steps=1", "parallelism.tp=2")
    tracer.run("train", *tracer.small, "run.name=x", "run.steps=2", "parallelism.tp=1")
    tracer.assert_order()
