"""Fault tolerance of the training loop: signals, saves, watchdog, rollback and periodic checks."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from hlat.checkpoint.checkpointer import Checkpointer
from hlat.checkpoint.training_state import TrainingState
from hlat.config.config_errors import ExitCode
from hlat.config.run import Config
from hlat.config.run_steps import compute_total_steps
from hlat.data.data_loader import DataLoader
from hlat.distributed import heartbeat
from hlat.engine import graph_extraction
from hlat.engine.interface import Engine, StepMetrics
from hlat.engine.step_profiler import StepProfiler
from hlat.recovery import periodic_checks
from hlat.recovery.replica_verification import verify_replicas
from hlat.recovery.rollback_policy import NextAction, RollbackPolicy
from hlat.recovery.signal_handler import DUPLICATE_SIGNAL_WINDOW_S, SignalHandler
from hlat.recovery.slow_step_notice import SlowStepNotice
from hlat.recovery.step_watchdog import StepWatchdog
from hlat.tracking.tracker import Tracker


class FaultTolerance:
    """Context manager around the training loop, entered after `resume`."""

    def __init__(
        self, config: Config, run_dir: Path, engine: Engine, loader: DataLoader, tracker: Tracker
    ) -> None:
        self._config, self._engine, self._tracker = config, engine, tracker
        self._loader = loader
        self._checkpointer = Checkpointer(config, run_dir, engine, loader, tracker, verify_replicas)
        self._rollback_policy = RollbackPolicy(config, run_dir, engine, loader, tracker)
        self._watchdog = StepWatchdog(config.recovery, run_dir, engine.parallel_state.rank)
        self._profiler = StepProfiler(config, run_dir, engine, tracker)
        is_supervised = heartbeat.open_heartbeat() is not None
        self._num_unsaved_steps = 0
        self._signal_handler = SignalHandler(
            engine.parallel_state.is_rank0,
            DUPLICATE_SIGNAL_WINDOW_S if is_supervised else 0.0,
            lambda: not is_supervised and self._num_unsaved_steps == 0,
        )
        self._slow_step_notice = SlowStepNotice(tracker.print_message)
        self._exit_stack = ExitStack()

    def __enter__(self) -> "FaultTolerance":
        self._exit_stack.callback(self._checkpointer.close)
        self._exit_stack.enter_context(self._signal_handler)
        self._exit_stack.enter_context(self._watchdog)
        if self._engine.parallel_state.is_rank0:
            self._exit_stack.enter_context(self._slow_step_notice)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._exit_stack.__exit__(*exc_info)

    def profile(self, step: int) -> AbstractContextManager[None]:
        """Return a context that records the training step if `profiler.steps` contains it."""
        return self._profiler.profile(step, self.watchdog_paused)

    def step(self) -> bool:
        """Record a finished step; return True if any rank has received a signal to stop."""
        self._watchdog.step()
        self._slow_step_notice.step()
        self._num_unsaved_steps += 1
        self._checkpointer.log_finished_save()
        has_signal = self._signal_handler.signal_name is not None
        return self._engine.parallel_state.world_group.any(has_signal)

    def check_metrics(
        self, state: TrainingState, metrics: StepMetrics
    ) -> tuple[NextAction, TrainingState]:
        """Evaluate a logged step, and roll back to a checkpoint if the run has diverged.

        Returns the action of the training loop and the state to continue with.

        Raises:
            ConfigError: A data file has changed, which may be the cause.
        """
        if graph_extraction.is_extracting_graphs() or not self._rollback_policy.has_diverged(
            state.step, metrics
        ):
            return NextAction.CONTINUE, state
        self._watchdog.pause()
        self._checkpointer.wait()
        self._loader.validate_files()
        return self._rollback_policy.roll_back(state, metrics)

    @contextmanager
    def watchdog_paused(self) -> Iterator[None]:
        """Apply the start timeout within the context, for work longer than a step."""
        self._watchdog.pause()
        yield
        self._watchdog.resume()

    def is_save_due(self, step: int) -> bool:
        """Return True if the configuration requests a save after `step`."""
        return self._checkpointer.is_save_due(step)

    def save(self, state: TrainingState, wait: bool) -> ExitCode | None:
        """Start a save; return the exit code if the run has to end, else None.

        At the end of the run, `wait` until the checkpoint is complete. Data files are compared with
        their first state, at the end of the run after the save.

        Raises:
            ConfigError: A data file has changed.
            ReplicaMismatchError: Replicas differ and the faulty rank is unknown.
        """
        self._watchdog.pause()
        if not wait:
            self._loader.validate_files()
        if not self._checkpointer.save(state, self._rollback_policy.first_bad_step):
            return ExitCode.UNHEALTHY_NODE
        self._num_unsaved_steps = 0
        if not wait:
            self._watchdog.resume()
        elif not self._checkpointer.wait():
            self._tracker.log_event("fail", state.step, reason="the last state could not be saved")
            return ExitCode.FAILED
        else:
            self._loader.validate_files()
        return None

    def run_periodic_checks(self, step: int) -> ExitCode | None:
        """Check replicas and causality if due, and at the end the held-out loss.

        Returns the exit code of a failed check, else None.

        Raises:
            ReplicaMismatchError: Replicas differ and the faulty rank is unknown.
        """
        if graph_extraction.is_extracting_graphs():
            return None
        if step == compute_total_steps(self._config):
            failure = periodic_checks.check_heldout_loss(
                self._config, self._engine, self._tracker, step
            )
            if failure is not None:
                return failure
        interval = self._config.recovery.check_replicas_every_steps
        if interval is None or step % interval:
            return None
        with self.watchdog_paused():
            return periodic_checks.run_periodic_checks(
                self._config, self._engine, self._tracker, step
            )

    def record_interruption(self, step: int) -> None:
        """Log the signal that ends the run, and ignore further signals after the final save."""
        self._signal_handler.ignore_signals()
        group = self._engine.parallel_state.world_group
        names = group.gather_object(self._signal_handler.signal_name)
        name = next(filter(None, names), None)  # of the first rank that has received one
        self._tracker.log_event("interrupt", step, signal=name)
