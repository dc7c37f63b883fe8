"""Starts commands of hlat without their imports: by a fork of a process that has done them.

Importing takes ten times as long as all else that a small run does at its start, so that most kills
would hit imports. A forked process is one like any other: it has a number, files, memory and a
parent of its own, can be killed and stopped, and is started by hlat's own supervisor where there is
one. What a user's command does before hlat's first line is not tried; a part of the trials is
started as a user does.
"""

import gc
import importlib
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

import hlat
from tests.faults.injected import sitecustomize

_FIRST_OWN = 3
"""Descriptors from here on are the parent's."""
_FORK_SAFE = "jemalloc_bg_thd"
"""A thread of pyarrow's that starts again by itself after a fork."""


def import_all() -> None:
    """Import what a run would, and make sure that a fork leaves no thread behind."""
    skipped = ("hlat.model.hugging_face_config", "hlat.engine.nxd.")  # transformers, Neuron
    for module in pkgutil.walk_packages(hlat.__path__, "hlat."):
        if not module.name.startswith(skipped):
            importlib.import_module(module.name)
    for name in ("matplotlib.backends.backend_svg", "numpy.random", "tokenizers"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    lost = [name for name in names[1:] if name != _FORK_SAFE]
    if lost:
        raise RuntimeError(f"threads {lost} would be lost by a fork; set OMP_NUM_THREADS=1")


class Forked:
    """A process that runs `python -m hlat.train WORDS`; the parts of Popen that are needed.

    Args:
        words: What is typed after `hlat.train`.
        environment: All of it.
        cwd: Where; None: here.
        stdout: Descriptor; None: this one's.
        stderr: The same.
    """

    def __init__(
        self,
        words: list[str],
        environment: dict[str, str],
        cwd: Path | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                _become(environment, cwd, stdout, stderr)
                code = _run(words)
            finally:
                os._exit(code)

    def poll(self) -> int | None:
        """Its exit code, or -N after signal N; None while it runs."""
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The same when it has ended.

        Raises:
            TimeoutExpired: It has not within so many seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("hlat.train", timeout or 0)
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _become(
    environment: dict[str, str], cwd: Path | None, stdout: int | None, stderr: int | None
) -> None:
    """Forget what the parent was."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor, target in ((null, 0), (stdout, 1), (stderr, 2)):
        if descriptor is not None:
            os.dup2(descriptor, target)
    os.closerange(_FIRST_OWN, 4096)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if cwd is not None:
        os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    # By this name `trials.ranks` knows it; /proc/<pid>/environ is the first ancestor's
    name = f"hlat rank {environment['RANK']}" if "RANK" in environment else "hlat command"
    Path("/proc/self/comm").write_text(name)


def _run(words: list[str]) -> int:
    """What `python -m hlat.train` does; returns the exit code."""
    from hydra.core.global_hydra import GlobalHydra

    from hlat import train
    from hlat.config import entry_point

    GlobalHydra.instance().clear()  # of the supervisor
    sitecustomize.patch(sys.modules)
    subprocess_handler.Popen = _start_rank  # type: ignore[assignment, misc]
    sys.argv = [train.__file__, *words]
    _as_main(train)
    try:
        entry_point.run_entry_point(train.main)
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _as_main(module: ModuleType) -> None:
    """Let Hydra name the job as if the module had been started."""
    main: Any = sys.modules["__main__"]
    main.__spec__, main.__file__ = module.__spec__, module.__file__


def _start_rank(
    args: list[str], env: dict[str, str], stdout: Any, stderr: Any, start_new_session: bool
) -> Forked:
    """What TorchElastic calls instead of Popen."""
    words = args[args.index("hlat.train") + 1 :]
    out, error = (None if file is None else file.fileno() for file in (stdout, stderr))
    return Forked([*words], env, None, out, error)
