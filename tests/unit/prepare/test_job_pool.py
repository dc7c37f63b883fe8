"""Jobs in processes: completion, failure of a job, and death of the parent."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hlat.config.config_errors import ConfigError
from hlat.prepare import job_pool
from hlat.storage.progress_bar import ProgressBar

REPOSITORY = Path(__file__).resolve().parents[4]


def _work(job: Path, tick: Callable[[int], None]) -> None:
    """Return, raise, die or run forever, as the file specifies."""
    order = job.read_text()
    if order == "refuse":
        raise ConfigError("one problem", "another")
    if order == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    tick(len(order))
    while order == "forever":
        tick(0)
    job.with_suffix(".done").touch()


def _write_jobs(folder: Path, *orders: str) -> list[Path]:
    paths = [folder / f"{number}.job" for number in range(len(orders))]
    for path, order in zip(paths, orders, strict=True):
        path.write_text(order)
    return paths


def _run(jobs: list[Path], num_workers: int) -> set[Path]:
    progress = ProgressBar("working", 100)
    try:
        return set(job_pool.run_jobs(_work, jobs, num_workers, progress))
    finally:
        progress.close()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_all_jobs_are_completed(tmp_path: Path, num_workers: int) -> None:
    jobs = _write_jobs(tmp_path, "a", "b", "c", "d", "e")
    assert _run(jobs, num_workers) == set(jobs)
    assert all(job.with_suffix(".done").exists() for job in jobs)


def test_the_first_failure_stops_the_others(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        _run(_write_jobs(tmp_path, "forever", "refuse", "c", "d"), 2)
    assert str(error.value) == "one problem\nanother"


def test_killed_worker_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ChildProcessError, match="a worker process was killed"):
        _run(_write_jobs(tmp_path, "die", "forever"), 2)


PARENT = """
import os, sys
from pathlib import Path
from tests_job_pool import _write_jobs, _run
_run(_write_jobs(Path(sys.argv[1]), "forever", "forever"), 2)
"""


def test_no_worker_outlives_its_parent(tmp_path: Path) -> None:
    """Wait for the end of the pipe, which workers inherit from the parent."""
    (tmp_path / "tests_job_pool.py").write_text(Path(__file__).read_text())
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{tmp_path}"}
    reading, writing = os.pipe()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)],
        env=environment,
        stdout=writing,
        stderr=subprocess.PIPE,
        pass_fds=(),
    )
    os.close(writing)
    assert parent.stderr is not None
    assert b"working" in parent.stderr.readline()
    parent.kill()
    parent.wait()
    parent.stderr.close()
    with os.fdopen(reading, "rb") as pipe:
        pipe.read()
