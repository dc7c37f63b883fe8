"""Forked processes have the output, environment, session and exit code of separate ones."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest

from hlat.recovery import prepared_process
from hlat.recovery.prepared_process import PreparedProcess, start_server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MODULE = """
import os, signal, sys, time
def count_threads(pid):
    return len(os.listdir(f"/proc/{pid}/task"))
print(__name__, *sys.argv[1:], os.environ["WORD"], os.getcwd())
print("session", os.getsid(0) == os.getpid(), "torch" in sys.modules)
print("threads", count_threads("self"), count_threads(os.getppid()))
if sys.argv[1] == "abort":
    os.abort()
if sys.argv[1] == "wait":
    print("waits", flush=True)
    time.sleep(60)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture(autouse=True, scope="module")
def own_server() -> Iterator[None]:
    """Use another fork server than tests of ranks, which may have started one in this process."""
    server = forkserver.ForkServer()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("set_forkserver_preload", "ensure_running", "connect_to_new_process"):
            patch.setattr(forkserver, name, getattr(server, name))
        patch.setattr(prepared_process, "_variables", None)
        yield


@pytest.fixture
def start(tmp_path, monkeypatch):
    (tmp_path / "prepared_program.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert start_server(dict(os.environ), {}, [["run.steps=1"]])

    def start_one(word: str, log: str = "log") -> PreparedProcess:
        environment = {**os.environ, "WORD": f"of {word}"}
        return PreparedProcess("prepared_program", [word], environment, Path(log))

    return start_one


def wait_for(text: str, log: str) -> None:
    deadline = time.monotonic() + 60
    while not Path(log).exists() or text not in Path(log).read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_output_environment_session_and_exit_code(start, tmp_path) -> None:
    process = start("3")
    process.wait()
    assert process.poll() == 3
    assert Path("log").read_text().splitlines() == [
        f"__main__ 3 of 3 {tmp_path}",
        "session True True",
        "threads 1 1",
    ]


def test_end_of_one_process_does_not_affect_the_others(start) -> None:
    waiting = start("wait", "waiting")
    wait_for("waits", "waiting")
    aborted = start("abort", "aborted")
    aborted.wait()
    assert aborted.poll() == -signal.SIGABRT
    killed = start("wait", "killed")
    wait_for("waits", "killed")
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert killed.poll() == -signal.SIGKILL
    assert waiting.poll() is None
    waiting.send_signal(signal.SIGTERM)
    waiting.wait()
    assert waiting.poll() == -signal.SIGTERM
    waiting.send_signal(signal.SIGTERM)  # without effect


def test_other_variables_need_separate_processes(start) -> None:
    assert not start_server(dict(os.environ), {"OMP_NUM_THREADS": "3"}, [])
