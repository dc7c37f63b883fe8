"""Runs submitted to a Slurm that is started for the tests."""

import json
import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hlat.config.override_keys import merge_overrides
from tests.run.conftest import REPOSITORY, Runner
from tests.run.test_processes import SKIP_FIGURES
from tests.slurm.cluster import Cluster, missing

TWO_NODES = (
    "hardware.nodes=2",
    "hardware.processes_per_node=1",
    "parallelism.tp=2",
)
USER = os.environ.get("HLAT_TEST_USER")
"""Name of an ordinary user who submits the jobs instead of root, such as nobody. The user must be
able to run this Python and to search the directory of --basetemp."""
_REASON = missing()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slurm)
            item.add_marker(pytest.mark.xdist_group("slurm"))
            if _REASON is not None:
                item.add_marker(pytest.mark.skip(reason=_REASON))


def make_readable(folder: Path) -> None:
    """Allow the ordinary user of these tests, if any, to read a folder of pytest."""
    if USER is not None:
        for path in (folder, *folder.parents):
            if path == Path(tempfile.gettempdir()):
                break
            path.chmod(0o755)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    make_readable(folder)
    with Cluster(folder, num_train=3, num_background=4) as up:
        yield up


class Login:
    """Folder of a user on the login node. Reports of runs have empty figures."""

    def __init__(self, cluster: Cluster, folder: Path, small: list[str]) -> None:
        self.cluster, self.folder, self.small = cluster, folder, small
        path = f"{REPOSITORY}{os.pathsep}{folder}"
        self.environment = cluster.environment | {"PYTHONPATH": path}
        self._identity: dict[str, Any] = {}
        if USER is not None:
            user = pwd.getpwnam(USER)
            self._identity = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
            self.environment |= {"HOME": str(folder)}
            os.chown(folder, user.pw_uid, user.pw_gid)
            data_root = next(argument for argument in small if argument.startswith("data.root="))
            for path in (folder, Path(data_root.removeprefix("data.root="))):
                make_readable(path)
        self.inject("")

    def inject(self, code: str) -> None:
        """Run code at the start of every Python process of this user, on any node."""
        (self.folder / "sitecustomize.py").write_text(f"{SKIP_FIGURES}\n{code}")

    def wrap(self, program: str, script: str) -> None:
        """Run a shell script before each Slurm command with this name, also in jobs."""
        found = self.cluster.run("which", program).strip()
        path = self.folder / "bin" / program
        if not path.parent.exists():
            path.parent.mkdir()
            self.environment["PATH"] = f"{path.parent}{os.pathsep}{self.environment['PATH']}"
        path.write_text(f'#!/bin/sh\n{script}\nexec {found} "$@"\n')
        path.chmod(0o755)

    def python(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return self._run([sys.executable, "-m", *arguments])

    def shell(self, command: str) -> "subprocess.CompletedProcess[str]":
        return self._run(["sh", "-c", command])

    def _run(self, command: list[str]) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=600,
            **self._identity,
        )

    def send(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Submit the small run."""
        flags = [argument for argument in arguments if argument.startswith("-")]
        typed = [argument for argument in arguments if argument not in flags]
        arguments = (
            "hlat.train",
            *flags,
            "hydra/launcher=slurm",
            *merge_overrides(self.small, typed),
        )
        return self.python(*arguments)

    def jobs(self, *arguments: str) -> str:
        done = self.python("hlat.jobs", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def shown(self, name: str, submission: int = 1) -> dict[str, str]:
        """Return the fields of the newest job of a submission in `scontrol show job`."""
        rows = self.rows(name, f"submissions/{submission}/receipts.jsonl")
        return self.cluster.show_job(rows[-1]["job"])

    def wait_for(
        self, name: str, *states: str, submission: int = 1, seconds: float = 300
    ) -> dict[str, str]:
        """Wait until the job of a run is in one of these states."""

        def has_state() -> bool:
            return self.shown(name, submission)["JobState"] in states

        self.cluster.wait_until(seconds, f"{name} is {states}", has_state)
        return self.shown(name, submission)

    def wait_for_step(self, name: str, step: int, seconds: float = 300) -> None:
        def has_reached() -> bool:
            return any(row["step"] >= step for row in self.rows(name, "metrics.jsonl"))

        self.cluster.wait_until(seconds, f"{name} is at step {step}", has_reached)

    def rows(self, name: str, file: str) -> list[dict[str, Any]]:
        path = self.folder / "runs" / name / file
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]]

    def losses(self, name: str) -> list[tuple[int, float]]:
        return [(row["step"], row["loss"]) for row in self.rows(name, "metrics.jsonl")]

    def log(self, name: str) -> str:
        (path,) = (self.folder / f"runs/{name}/submissions/1").glob("*.log")
        return path.read_text()

    def cancel_jobs(self) -> None:
        """Cancel the jobs of this folder, and wait for their end."""
        arguments = ("squeue", "--noheader", "--format=%i %Z")

        def active() -> list[str]:
            rows = [line.split(None, 1) for line in self.cluster.run(*arguments).splitlines()]
            return [job for job, folder in rows if folder == str(self.folder)]

        for job in active():
            self.cluster.run("scancel", job, check=False)
        self.cluster.wait_until(120, f"no job of {self.folder} is left", lambda: not active())


@pytest.fixture
def login(cluster: Cluster, tmp_path: Path, small: list[str]) -> Iterator[Login]:
    user = Login(cluster, tmp_path, small)
    yield user
    user.cancel_jobs()


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, small: list[str]) -> Runner:
    """Return the runner of run `whole`, in this process."""
    runner = Runner(tmp_path_factory.mktemp("uninterrupted"), small)
    done = runner.run("run.name=whole")
    assert done.returncode == 0, done.stderr
    return runner


@pytest.fixture(scope="session")
def two_node_run(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, small: list[str]
) -> Login:
    """Return the user of run `whole`, trained on two nodes without interruption."""
    login = Login(cluster, tmp_path_factory.mktemp("whole"), small)
    done = login.send("run.name=whole", *TWO_NODES)
    assert done.returncode == 0, done.stderr
    login.wait_for("whole", "COMPLETED", "FAILED")
    return login
