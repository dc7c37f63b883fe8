"""Start commands of hlat without their imports, by forking a process that has imported everything.

Imports need ten times as long as the rest of the start of a small run, so most kills would hit
imports. A forked process has a separate process id, files, memory and parent, can be killed and
stopped, and is started by hlat's supervisor if there is one. The start of the interpreter is not
covered; some of the trials start commands as a user does.
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
from hlat.distributed.process_signals import STOP_SIGNALS
from tests.faults.injected import sitecustomize

_FIRST_OWN = 3
"""First file descriptor that is inherited from the parent."""
_FORK_SAFE = "jemalloc_bg_thd"
"""A thread of pyarrow that restarts by itself after a fork."""


def import_all() -> None:
    """Import the modules of a run; raise RuntimeError if a fork would lose a thread."""
    # They need transformers and Neuron's libraries
    skipped = ("hlat.model.families.hugging_face_config", "hlat.engine.nxd.")
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
    """Process that runs `python -m hlat.train ARGUMENTS`, with a subset of Popen's methods.

    Args:
        arguments: Arguments of `hlat.train`.
        environment: All environment variables.
        cwd: Working directory; None: the current one.
        stdout: File descriptor; None: that of this process.
        stderr: As `stdout`.
    """

    def __init__(
        self,
        arguments: list[str],
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
                code = _run(arguments)
            finally:
                os._exit(code)

    def poll(self) -> int | None:
        """Return the exit code, or -N after signal N; None while the process runs."""
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process and return its exit code.

        Raises:
            TimeoutExpired: It did not end within `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("hlat.train", timeout or 0)
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal if the process runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _become(
    environment: dict[str, str], cwd: Path | None, stdout: int | None, stderr: int | None
) -> None:
    """Replace session, files, signals and environment of the parent."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor, target in ((null, 0), (stdout, 1), (stderr, 2)):
        if descriptor is not None:
            os.dup2(descriptor, target)
    os.closerange(_FIRST_OWN, 4096)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if cwd is not None:
        os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    # `trials.ranks` reads this name; /proc/<pid>/environ is that of the first ancestor
    name = f"hlat rank {environment['RANK']}" if "RANK" in environment else "hlat command"
    Path("/proc/self/comm").write_text(name)


def _run(arguments: list[str]) -> int:
    """Run `python -m hlat.train` and return the exit code."""
    from hydra.core.global_hydra import GlobalHydra

    from hlat import train
    from hlat.config import entry_point
    from hlat.recovery import signal_handler

    GlobalHydra.instance().clear()  # of the supervisor
    sitecustomize.patch(sys.modules)
    subprocess_handler.Popen = _start_rank  # type: ignore[assignment, misc]
    sys.argv = [train.__file__, *arguments]
    _as_main(train)
    try:
        with signal_handler.handle_process_signals():
            entry_point.run_entry_point(train.main)
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _as_main(module: ModuleType) -> None:
    """Set the main module, from which Hydra derives the name of the job."""
    main: Any = sys.modules["__main__"]
    main.__spec__, main.__file__ = module.__spec__, module.__file__


def _start_rank(
    args: list[str], env: dict[str, str], stdout: Any, stderr: Any, start_new_session: bool
) -> Forked:
    """Start a rank; TorchElastic calls this instead of Popen."""
    arguments = args[args.index("hlat.train") + 1 :]
    out, error = (None if file is None else file.fileno() for file in (stdout, stderr))
    return Forked([*arguments], env, None, out, error)
