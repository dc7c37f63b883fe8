"""Runs in processes that are forked from a prepared one, in a fraction of the time of a new one.

The prepared process is multiprocessing's fork server. It imports `prepared_imports`, starts no
thread, and computes nothing, so that a forked process has the state of a new one after its imports.
"""

import json
import multiprocessing
import os
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path

OVERRIDES_VARIABLE = "HLAT_PREPARED_OVERRIDES"
"""Overrides that the prepared process composes, so that points with the same choices do not."""
_PRELOADED = "hlat.recovery.prepared_imports"
_SINGLE_THREAD = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""Variables without which the import of NumPy and of Arrow starts threads. Sources: OpenBLAS's
documentation, jemalloc's manual."""


_variables: dict[str, str] | None = None
"""Environment variables for libraries in the prepared process; None: it has not been started."""


class PreparedProcess:
    """A forked process that runs a module, with the methods of subprocess.Popen."""

    def __init__(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> None:
        """Start `python -m MODULE ARGUMENTS` in a new session, with its output in a file."""
        context = multiprocessing.get_context("forkserver")
        task = (module, [*arguments], {**environment}, str(log))
        self._process = context.Process(target=_run_module, args=task)
        with _environment({**environment, **_SINGLE_THREAD}):  # of a server that is started again
            self._process.start()

    def poll(self) -> int | None:
        """Return the exit code, negative after a signal, or None while the process runs."""
        return self._process.exitcode

    def wait(self) -> None:
        """Wait for the end of the process."""
        self._process.join()

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, if it has not ended."""
        if self._process.pid is not None and self._process.exitcode is None:
            os.kill(self._process.pid, number)


def start_server(
    environment: Mapping[str, str],
    variables: Mapping[str, str],
    overrides: Sequence[Sequence[str]],
) -> bool:
    """Start the prepared process; return False if it was started with other variables.

    Args:
        environment: Environment of the process.
        variables: Variables in addition, which libraries read when they are imported.
        overrides: Overrides of configurations to compose.
    """
    global _variables
    if _variables is None:
        _variables = {**variables}
        multiprocessing.get_context("forkserver").set_forkserver_preload([_PRELOADED])
        composed = {OVERRIDES_VARIABLE: json.dumps([*overrides])}
        with _environment({**environment, **variables, **_SINGLE_THREAD, **composed}):
            forkserver.ensure_running()
    return _variables == {**variables}


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Replace the environment of this process within the context."""
    before = {**os.environ}
    try:
        _set_environment(variables)
        yield
    finally:
        _set_environment(before)


def _set_environment(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def _run_module(module: str, arguments: list[str], environment: dict[str, str], log: str) -> None:
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file, stream.fileno())
        stream.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]
    os.close(file)
    _set_environment(environment)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
