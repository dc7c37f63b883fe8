"""Profiles of chosen steps by torch.profiler: trace, account and tables in profiles/ of a run.

A profile never ends a run: a rank that cannot record or write logs the reason.
"""

import csv
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from hlat.config.run import Config
from hlat.engine.interface import Engine, StepRecording
from hlat.engine.step_account import (
    build_module_table,
    build_operator_table,
    compute_account,
    divide_step,
)
from hlat.engine.trace_events import load_trace
from hlat.storage.durable_files import replace_file
from hlat.tracking.tracker import Tracker

PROFILES_DIR = "profiles"
"""Directory of the profiles in the run directory."""
_ERRORS = (OSError, RuntimeError, ValueError, EOFError, AssertionError)
"""Errors of torch.profiler, a full disk, and a trace that was written incompletely."""


class StepProfiler:
    """Recorder of the steps and ranks in `profiler` of the configuration."""

    def __init__(self, config: Config, run_dir: Path, engine: Engine, tracker: Tracker) -> None:
        self._settings, self._engine, self._tracker = config.profiler, engine, tracker
        self._directory = run_dir / PROFILES_DIR
        self._inactive = nullcontext()

    def profile(
        self, step: int, pause: Callable[[], AbstractContextManager[None]]
    ) -> AbstractContextManager[None]:
        """Return a context that records `step` if it is chosen; all ranks enter it.

        `pause` suspends the watchdog, since writing a trace may take longer than a step.
        """
        if step not in self._settings.steps:
            return self._inactive
        return self._profile(step, pause)

    @contextmanager
    def _profile(
        self, step: int, pause: Callable[[], AbstractContextManager[None]]
    ) -> Iterator[None]:
        rank = self._engine.parallel_state.rank
        prefix = self._directory / f"step_{step}_rank_{rank}"
        recording, outcome = None, dict[str, Any]()
        with pause():
            if rank in self._settings.ranks:
                recording, outcome = self._start(rank)
            try:
                yield
            finally:
                if recording is not None:
                    outcome = self._finish(recording, step, rank, prefix)
            self._log(step, self._engine.parallel_state.world_group.gather_object(outcome))

    def _start(self, rank: int) -> tuple[StepRecording | None, dict[str, Any]]:
        """Start the record; return it, or None and the reason of a failure."""
        try:
            self._directory.mkdir(exist_ok=True)
            return self._engine.start_recording(), {}
        except _ERRORS as error:
            return None, {"rank": rank, "reason": str(error)}

    def _finish(
        self, recording: StepRecording, step: int, rank: int, prefix: Path
    ) -> dict[str, Any]:
        """Stop the record and write all files; return rank and duration, or the reason."""
        start = time.perf_counter()
        try:
            recording.stop(Path(f"{prefix}_memory.pickle"))
            trace = Path(f"{prefix}.json.gz")
            recording.write_trace(trace)
            write_tables(trace, prefix, step, rank)
        except _ERRORS as error:
            return {"rank": rank, "reason": str(error) or type(error).__name__}
        return {"rank": rank, "seconds": time.perf_counter() - start}

    def _log(self, step: int, outcomes: list[dict[str, Any]]) -> None:
        """Log the outcome of the ranks that record, on rank 0."""
        written = [outcome for outcome in outcomes if "seconds" in outcome]
        if written:
            ranks = [outcome["rank"] for outcome in written]
            seconds = max(outcome["seconds"] for outcome in written)
            self._tracker.log_event("profile", step, ranks=ranks, seconds=seconds)
        for outcome in outcomes:
            if "reason" in outcome:
                self._tracker.log_event("profile_failed", step, **outcome)
                self._tracker.print_message(
                    f"WARNING: step {step} of rank {outcome['rank']} could not be profiled: "
                    f"{outcome['reason']}; training continues"
                )


def write_tables(trace_path: Path, prefix: Path, step: int, rank: int) -> None:
    """Write the account of a trace, and its tables by operator and by module.

    Raises:
        OSError: A file cannot be written.
        ValueError: The file is not a complete trace of a step.
    """
    trace = load_trace(trace_path)
    slices = divide_step(trace)
    account = {
        "step": step,
        "rank": rank,
        "has_memory_snapshot": Path(f"{prefix}_memory.pickle").exists(),
        "clock": "device" if trace.device_events else "host",
        "seconds": (trace.step.end - trace.step.start) / 1e6,
        "classes": compute_account(slices),
    }
    _write_csv(Path(f"{prefix}_operators.csv"), build_operator_table(slices))
    _write_csv(Path(f"{prefix}_modules.csv"), build_module_table(slices))
    replace_file(Path(f"{prefix}_account.json"), (json.dumps(account, indent=2) + "\n").encode())


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
