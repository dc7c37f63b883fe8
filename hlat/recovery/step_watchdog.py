"""Watchdog that ends a run whose steps exceed `recovery.step_timeout_s`.

Under hlat's supervisor the deadline is in a heartbeat file, so the supervisor also detects a
stopped process, and collects the stacks of all ranks of the node in one file. Otherwise a timer of
`faulthandler`, which needs no interpreter lock, writes the stacks and ends the process.
"""

import faulthandler
from pathlib import Path

from hlat.config.recovery import RecoveryConfig
from hlat.distributed import heartbeat


class StepWatchdog:
    """Context manager with a deadline for each step; inactive without recovery.step_timeout_s."""

    def __init__(self, recovery: RecoveryConfig, run_dir: Path, rank: int) -> None:
        self._recovery = recovery
        self._is_active = recovery.step_timeout_s is not None
        self._stacks_path = run_dir / "logs" / f"rank_{rank}.stacks"
        self._heartbeat = heartbeat.open_heartbeat()
        self._num_steps = 0

    def __enter__(self) -> "StepWatchdog":
        if self._is_active and self._heartbeat is None:
            self._stacks_path.parent.mkdir(exist_ok=True)
            self._stacks_file = self._stacks_path.open("a")
        self.pause()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._set_deadline(None)
        if not self._is_active or self._heartbeat is not None:
            return
        self._stacks_file.close()
        if self._stacks_path.stat().st_size == 0:
            self._stacks_path.unlink()

    def step(self) -> None:
        """Record a finished step; the start timeout includes a second compilation."""
        self._num_steps += 1
        if self._heartbeat is not None:
            self._heartbeat.has_started = True
        self.resume()

    def pause(self) -> None:
        """Apply the start timeout during work that is longer than a step."""
        self._set_deadline(self._recovery.start_timeout_s)

    def resume(self) -> None:
        """Apply the step timeout to the next step."""
        recovery = self._recovery
        self._set_deadline(
            recovery.step_timeout_s if self._num_steps > 1 else recovery.start_timeout_s
        )

    def _set_deadline(self, timeout_s: float | None) -> None:
        if not self._is_active:
            return
        if self._heartbeat is not None:
            self._heartbeat.set_deadline(timeout_s)
        elif timeout_s is None:
            faulthandler.cancel_dump_traceback_later()
        else:
            faulthandler.dump_traceback_later(timeout_s, exit=True, file=self._stacks_file)
