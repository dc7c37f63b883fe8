"""Whole runs as a user starts them: a process, a command line, a folder, an exit code."""

import contextlib
import functools
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from hlat import train
from hlat.config import entry_point
from hlat.config.config_errors import ExitCode
from hlat.config.override_keys import merge_overrides
from hlat.data.tokenizer import EMBEDDED_FILE
from hlat.figures.report_figure import ReportFigure

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PYTHONPATH = os.pathsep.join([str(REPOSITORY), str(Path(__file__).with_name("patched").resolve())])
"""PYTHONPATH of processes that train: with hlat, and with empty figures in reports."""
BOS, BOS_ID = "<|begin|>", 4096
"""The token that `bos_tokenizer_file` adds to the embedded tokenizer."""


class Runner:
    """Runs `python -m hlat.train` on the small run in a separate folder."""

    def __init__(self, folder: Path, small: list[str]) -> None:
        self.folder = folder
        self.environment = os.environ | {"PYTHONPATH": PYTHONPATH}
        self.small = small

    def run(
        self, *overrides: str, small: bool = True, task: Callable[..., ExitCode] = train.main
    ) -> "subprocess.CompletedProcess[str]":
        """Run the entry in this process, which saves the import of torch.

        Figures of the report are empty files: rendering them would double the time. Processes that
        the entry starts, such as the points of a sweep, write to the streams of pytest.
        """
        flags = [argument for argument in overrides if argument.startswith("-")]
        typed = [argument for argument in overrides if argument not in flags]
        arguments = ["hlat.train", *flags, *merge_overrides(self.small if small else [], typed)]
        out, err = io.StringIO(), io.StringIO()
        code = 0
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            patch.chdir(self.folder)
            patch.setenv("PYTHONPATH", self.environment["PYTHONPATH"])
            patch.setattr(sys, "argv", arguments)
            patch.setattr(ReportFigure, "render_svg", lambda _: "<svg></svg>")
            patch.setattr(ReportFigure, "render_png", lambda _: b"")
            try:
                entry_point.run_entry_point(task)
            except SystemExit as end:
                code = int(end.code or 0)
        return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())

    def start(self, *arguments: str, start_new_session: bool = False) -> "subprocess.Popen[str]":
        """Start the entry in a new process."""
        flags = [argument for argument in arguments if argument.startswith("-")]
        overrides = [argument for argument in arguments if argument not in flags]
        return subprocess.Popen(
            [sys.executable, "-m", "hlat.train", *flags, *merge_overrides(self.small, overrides)],
            cwd=self.folder,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=start_new_session,
        )

    def run_process(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        process = self.start(*arguments)
        out, err = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def run_until(
        self,
        step: int,
        number: signal.Signals,
        *overrides: str,
        send: Callable[..., None] = subprocess.Popen.send_signal,
    ) -> "subprocess.CompletedProcess[str]":
        """Send a signal as soon as a step has been logged; training waits for the signal.

        The process has its own process group.
        """
        sent = self.folder / f"signal_{time.monotonic_ns()}"
        self.environment["HLAT_TEST_PAUSE"] = f"{step}:{sent}"
        process = self.start(*overrides, start_new_session=True)
        del self.environment["HLAT_TEST_PAUSE"]
        name = next(o.removeprefix("run.name=") for o in overrides if o.startswith("run.name="))
        while process.poll() is None:
            if any(row["step"] >= step for row in self.rows(name, "metrics.jsonl")):
                send(process, number)
                break
            time.sleep(0.02)
        sent.touch()
        out, err = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def rows(self, name: str, file: str) -> list[dict[str, Any]]:
        path = self.folder / "runs" / name / file
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]]

    def losses(self, name: str) -> list[tuple[int, float]]:
        return [(row["step"], row["loss"]) for row in self.rows(name, "metrics.jsonl")]

    def weights(self, name: str, step: int) -> bytes:
        return (
            self.folder / f"runs/{name}/checkpoints/step_{step:08}/rank_00000.safetensors"
        ).read_bytes()


class CommandResult(NamedTuple):
    """Exit code and output of a command that ran in this process."""

    code: int
    out: str
    err: str


def call_command(
    main: Callable[[Sequence[str]], Any], folder: Path, *arguments: str
) -> CommandResult:
    """Run the main function of a command in this process, in a folder."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.chdir(folder)
        try:
            code = int(main(arguments))
        except SystemExit as end:
            code = int(end.code or 0)
    return CommandResult(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    """Restore the environment after each module; `hlat evaluate` turns off tqdm for processes."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def harness_tasks_listed_once() -> Iterator[None]:
    """Cache the list of thousands of tasks of lm-evaluation-harness."""
    tasks = pytest.importorskip("lm_eval.tasks", reason="lm_eval is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "TaskManager", functools.cache(tasks.TaskManager))
        yield


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Render the figures of reports in this process as empty files."""
    monkeypatch.setattr(ReportFigure, "render_svg", lambda _: "<svg></svg>")
    monkeypatch.setattr(ReportFigure, "render_png", lambda _: b"")


@pytest.fixture(scope="session")
def bos_tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the embedded tokenizer with the additional special token BOS."""
    content = json.loads(EMBEDDED_FILE.read_text(encoding="utf-8"))
    (token,) = content["added_tokens"]
    content["added_tokens"].append(token | {"id": BOS_ID, "content": BOS})
    path = tmp_path_factory.mktemp("bos") / "tokenizer.json"
    path.write_text(json.dumps(content))
    return path


@pytest.fixture(scope="session")
def bos_overrides(bos_tokenizer_file: Path) -> tuple[str, ...]:
    """Return overrides of a run with BOS before each document."""
    tokenizer = f"data.tokenizer={bos_tokenizer_file}"
    return (tokenizer, f'data.bos_token="{BOS}"', "model.vocab_size=4160")


@pytest.fixture
def runner(tmp_path: Path, small: list[str]) -> Runner:
    return Runner(tmp_path, small)


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, small: list[str]) -> Runner:
    """Train the small run once without a fault, under the name `whole`."""
    runner = Runner(tmp_path_factory.mktemp("uninterrupted"), small)
    done = runner.run("run.name=whole")
    assert done.returncode == 0, done.stderr
    return runner


@pytest.fixture(scope="session")
def _partial_runs(
    tmp_path_factory: pytest.TempPathFactory, small: list[str]
) -> Callable[..., Path]:
    """Return the folder in which the small run was trained up to a step, under the name `x`."""

    @functools.cache
    def train_up_to(step: int) -> Path:
        runner = Runner(tmp_path_factory.mktemp(f"up_to_{step}"), small)
        done = runner.run("run.name=x", f"run.steps={step}")
        assert done.returncode == 0, done.stderr
        return runner.folder

    return train_up_to


@pytest.fixture
def runner_at_step_2(runner: Runner, _partial_runs: Callable[..., Path]) -> Runner:
    """Return a runner with a copy of the small run up to step 2, under the name `x`."""
    shutil.copytree(_partial_runs(2) / "runs", runner.folder / "runs")
    return runner


@pytest.fixture
def runner_at_step_10(runner: Runner, _partial_runs: Callable[..., Path]) -> Runner:
    """Return a runner with a copy of the small run up to step 10, under the name `x`."""
    shutil.copytree(_partial_runs(10) / "runs", runner.folder / "runs")
    return runner


@pytest.fixture
def refused() -> Callable[["subprocess.CompletedProcess[str]", str], None]:
    """Return a function that asserts exit code 2, a message, no traceback and no training."""

    def check(done: "subprocess.CompletedProcess[str]", sentence: str) -> None:
        assert done.returncode == 2, done.stderr
        assert sentence in done.stderr
        assert "Traceback" not in done.stderr
        assert "step 1/" not in done.stdout

    return check
