"""Runs sent to a Slurm that is started for the tests."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import Cluster, missing

REPOSITORY = Path(__file__).resolve().parent.parent.parent
TWO_NODES = (
    "hardware.nodes=2",
    "hardware.processes_per_node=1",
    "parallelism.tp=2",
)
_WITHOUT = missing()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slurm)
            item.add_marker(pytest.mark.xdist_group("slurm"))
            if _WITHOUT is not None:
                item.add_marker(pytest.mark.skip(reason=_WITHOUT))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), 3) as up:
        yield up


class Login:
    """A folder of a user on the login node."""

    def __init__(self, cluster: Cluster, folder: Path, small: list[str]) -> None:
        self.cluster, self.folder, self.small = cluster, folder, small
        self.environment = cluster.environment | {"PYTHONPATH": str(REPOSITORY)}

    def inject(self, code: str) -> None:
        """Let every training process begin with some code."""
        (self.folder / "sitecustomize.py").write_text(
            f"import os\nif 'RANK' in os.environ:\n{code}"
        )
        self.environment["PYTHONPATH"] += os.pathsep + str(self.folder)

    def python(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", *words],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def send(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Train the small run through Slurm."""
        flags = [word for word in words if word.startswith("-")]
        typed = [word for word in words if word not in flags]
        words = ("hlat.train", *flags, "hydra/launcher=slurm", *self.small, *typed)
        return self.python(*words)

    def jobs(self, *words: str) -> str:
        done = self.python("hlat.jobs", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def shown(self, name: str, submission: int = 1) -> dict[str, str]:
        """What Slurm knows of the newest job of a submission."""
        rows = self.rows(name, f"submissions/{submission}/receipts.jsonl")
        told = self.cluster.run("scontrol", "show", "job", rows[-1]["job"])
        return dict(word.split("=", 1) for word in told.split() if "=" in word)

    def wait_for(
        self, name: str, *states: str, submission: int = 1, seconds: float = 120
    ) -> dict[str, str]:
        """Wait until the job of a run is in one of some states."""

        def there() -> bool:
            return self.shown(name, submission)["JobState"] in states

        self.cluster.wait_until(seconds, f"{name} is {states}", there)
        return self.shown(name, submission)

    def wait_for_step(self, name: str, step: int, seconds: float = 120) -> None:
        def there() -> bool:
            return any(row["step"] >= step for row in self.rows(name, "metrics.jsonl"))

        self.cluster.wait_until(seconds, f"{name} is at step {step}", there)

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


@pytest.fixture
def login(cluster: Cluster, tmp_path: Path, small: list[str]) -> Iterator[Login]:
    yield Login(cluster, tmp_path, small)
    for job in cluster.run("squeue", "--noheader", "--format=%i").split():
        cluster.run("scancel", job, check=False)
    cluster.wait_until(30, "no job is left", lambda: not cluster.run("squeue", "--noheader"))


@pytest.fixture(scope="session")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, small: list[str]) -> Login:
    """A run on two nodes that nothing happened to."""
    login = Login(cluster, tmp_path_factory.mktemp("whole"), small)
    done = login.send("run.name=whole", *TWO_NODES)
    assert done.returncode == 0, done.stderr
    login.wait_for("whole", "COMPLETED", "FAILED")
    return login
