"""Whole runs as a user starts them: a process, a command line, a folder, an exit code."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hlat import train
from hlat.config import entry_point
from hlat.report.figures import ReportFigure

REPOSITORY = Path(__file__).resolve().parent.parent.parent


class Runner:
    """Runs `python -m hlat.train` on the small run, in a folder of its own."""

    def __init__(self, folder: Path, small: list[str]) -> None:
        self.folder = folder
        self.environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        self.small = small

    def run(self, *overrides: str, small: bool = True) -> "subprocess.CompletedProcess[str]":
        """Run the entry in this process, which saves the seconds that importing torch takes.

        The pictures of its report stay empty: drawing them takes as long as all else.
        """
        flags = [word for word in overrides if word.startswith("-")]
        typed = [word for word in overrides if word not in flags]
        words = ["hlat.train", *flags, *(self.small if small else []), *typed]
        out, err = io.StringIO(), io.StringIO()
        code = 0
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            patch.chdir(self.folder)
            patch.setattr(sys, "argv", words)
            patch.setattr(ReportFigure, "render_svg", lambda _: "<svg></svg>")
            patch.setattr(ReportFigure, "render_png", lambda _: b"")
            try:
                entry_point.run_entry_point(train.main)
            except SystemExit as end:
                code = int(end.code or 0)
        return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """Start the entry in a process of its own."""
        flags = [word for word in arguments if word.startswith("-")]
        overrides = [word for word in arguments if word not in flags]
        return subprocess.Popen(
            [sys.executable, "-m", "hlat.train", *flags, *self.small, *overrides],
            cwd=self.folder,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run_process(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        process = self.start(*arguments)
        out, err = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def run_until(
        self, step: int, number: signal.Signals, *overrides: str
    ) -> "subprocess.CompletedProcess[str]":
        """Send a signal as soon as a step has been logged."""
        process = self.start(*overrides)
        name = next(o.removeprefix("run.name=") for o in overrides if o.startswith("run.name="))
        while process.poll() is None:
            if any(row["step"] >= step for row in self.rows(name, "metrics.jsonl")):
                process.send_signal(number)
                break
            time.sleep(0.005)
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


@pytest.fixture
def runner(tmp_path: Path, small: list[str]) -> Runner:
    return Runner(tmp_path, small)


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, small: list[str]) -> Runner:
    """The small run, run once without a fault, under the name `whole`."""
    runner = Runner(tmp_path_factory.mktemp("uninterrupted"), small)
    done = runner.run("run.name=whole")
    assert done.returncode == 0, done.stderr
    return runner


@pytest.fixture
def refused() -> Callable[["subprocess.CompletedProcess[str]", str], None]:
    """Assert exit code 2, one kind message, no traceback, nothing trained."""

    def check(done: "subprocess.CompletedProcess[str]", sentence: str) -> None:
        assert done.returncode == 2, done.stderr
        assert sentence in done.stderr
        assert "Traceback" not in done.stderr
        assert "step 1/" not in done.stdout

    return check
