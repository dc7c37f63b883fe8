"""Everything that keeps a run from losing its work, as the loop sees it.

Signals, saves, the watchdog and the judgement of the numbers meet here, so that the loop asks
five questions: was it told to stop, may it go on, is a save due, was it saved, are copies alike.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from hlat.config.errors import Exit
from hlat.config.run import Config
from hlat.data.loader import Loader
from hlat.engine import processes, tracing
from hlat.engine.interface import Engine, Numbers
from hlat.recovery import inspection
from hlat.recovery.checkpoints import Checkpoints
from hlat.recovery.guard import Guard
from hlat.recovery.interruption import ECHO_S, Interruption
from hlat.recovery.watchdog import Watchdog
from hlat.state import TrainingState
from hlat.tracking.tracker import Tracker


class Safety:
    """Context of a training loop, entered once engine and loader stand where it begins.

    Args:
        config: The run.
        folder: Its folder.
        engine: What is saved and rolled back.
        loader: The same of the data.
        tracker: The record.
    """

    def __init__(
        self, config: Config, folder: Path, engine: Engine, loader: Loader, tracker: Tracker
    ) -> None:
        self._config, self._engine, self._tracker = config, engine, tracker
        self._everyone = engine.world.everyone
        self._checkpoints = Checkpoints(config, folder, engine, loader, tracker)
        self._guard = Guard(config, folder, engine, loader, tracker)
        self._watchdog = Watchdog(config.recovery, folder, engine.world.rank)
        supervised = processes.pulse() is not None
        self._signals = Interruption(engine.world.chief, ECHO_S if supervised else 0.0)
        self._stack = ExitStack()

    def __enter__(self) -> "Safety":
        self._stack.callback(self._checkpoints.close)
        self._stack.enter_context(self._signals)
        self._stack.enter_context(self._watchdog)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def step(self) -> bool:
        """Note that a step was done; returns whether a signal has told any rank to stop."""
        self._watchdog.step()
        self._checkpoints.report()
        return self._everyone.any(self._signals.signal_name is not None)

    def check(self, state: TrainingState, numbers: Numbers) -> TrainingState | None:
        """Judge a logged step.

        Returns:
            The state itself if the run may go on, an earlier one if it was rolled back, and None if
            nothing helps.
        """
        if tracing.only_traces() or self._guard.allows(state.step, numbers):
            return state
        self._watchdog.pause()
        self._checkpoints.finish()
        return self._guard.roll_back(state, numbers)

    @contextmanager
    def patience(self) -> Iterator[None]:
        """Context of what takes longer than a step."""
        self._watchdog.pause()
        yield
        self._watchdog.resume()

    def save_is_due(self, step: int) -> bool:
        """Whether the configuration asks for a save after this step."""
        return self._checkpoints.is_due(step)

    def save(self, state: TrainingState, wait: bool) -> Exit | None:
        """Begin to save; returns how the run must end if it may not rely on that, else None.

        Args:
            state: Where the run stands.
            wait: Whether it ends here, and must know that it was saved.

        Raises:
            CopiesDifferError: There is no telling which rank holds the state that is right.
        """
        self._watchdog.pause()
        if not self._checkpoints.save(state, prune=self._guard.content):
            return Exit.UNHEALTHY_NODE
        if not wait:
            self._watchdog.resume()
        elif not self._checkpoints.finish():
            self._tracker.event("fail", state.step, reason="the last state could not be saved")
            return Exit.FAILED
        return None

    def inspect(self, step: int) -> Exit | None:
        """Look at the state if that is due; returns how the run must end, else None.

        Raises:
            CopiesDifferError: There is no telling which rank holds the state that is right.
        """
        every = self._config.recovery.check_replicas_every_steps
        if every is None or step % every or tracing.only_traces():
            return None
        with self.patience():
            return inspection.verdict(self._config, self._engine, self._tracker, step)

    def interrupt(self, step: int) -> None:
        """Write down that a signal ends the run; all is saved, so further ones change nothing."""
        self._tracker.event("interrupt", step, signal=self._signals.signal_name)
        self._signals.ignore()
