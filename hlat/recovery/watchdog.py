"""Says until when the next sign of life is due, so that a run that hangs does not hang for ever.

Under hlat's supervisor the time is written where the supervisor sees it, which also notices a
process that is stopped; elsewhere a timer of the interpreter, which needs none of its locks, ends
the process. Either way the stacks of all threads are written to logs/ first.
"""

import faulthandler
import signal
from pathlib import Path
from types import TracebackType

from hlat.config.recovery import Recovery
from hlat.engine import processes

DUMP = signal.SIGUSR1
"""Makes a process write its stacks."""


class Watchdog:
    """Context in which a run must show signs of life; without recovery.step_timeout_s, it need not.

    Args:
        recovery: How long steps, and everything else, may take.
        folder: The run's folder.
        rank: Number of this process.
    """

    def __init__(self, recovery: Recovery, folder: Path, rank: int) -> None:
        self._step_timeout_s, self._start_timeout_s = (
            recovery.step_timeout_s,
            recovery.start_timeout_s,
        )
        self._path = folder / "logs" / f"rank_{rank}.stacks"
        self._pulse = processes.pulse()
        self._num_steps = 0

    def __enter__(self) -> "Watchdog":
        if self._step_timeout_s is not None:
            self._path.parent.mkdir(exist_ok=True)
            self._file = self._path.open("a")
            faulthandler.register(DUMP, self._file, all_threads=True)
            self.pause()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._step_timeout_s is None:
            return
        self._expect(None)
        faulthandler.unregister(DUMP)
        self._file.close()
        if self._path.stat().st_size == 0:
            self._path.unlink()

    def step(self) -> None:
        """A step was done; the first one leaves time for a second compilation."""
        self._num_steps += 1
        self.resume()

    def pause(self) -> None:
        """Something begins that takes longer than a step."""
        self._expect(self._start_timeout_s)

    def resume(self) -> None:
        """It is over, and the next step is due."""
        self._expect(self._step_timeout_s if self._num_steps > 1 else self._start_timeout_s)

    def _expect(self, seconds: float | None) -> None:
        if self._step_timeout_s is None:
            return
        if self._pulse is not None:
            self._pulse.expect(seconds)
        elif seconds is None:
            faulthandler.cancel_dump_traceback_later()
        else:
            faulthandler.dump_traceback_later(seconds, exit=True, file=self._file)
