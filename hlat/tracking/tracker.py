"""The Tracker: metrics.jsonl with a row per logged step, and events.jsonl with a row per event.

Reports, resumption and the console read these files. Each row is written to its file before it is
passed to the configured tracking services.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from hlat.config import mfu
from hlat.config.batch_steps import count_tokens, get_sequence_length
from hlat.config.recorded_config import redact
from hlat.config.redaction import redact_data, redact_text
from hlat.config.run import Config
from hlat.config.run_steps import compute_total_steps
from hlat.model.decoder_spec import compute_flops_per_token
from hlat.storage.progress_bar import print_line
from hlat.tracking import (
    lost_work,
    provenance,
    run_directory,
    summary_metrics,
    tracking_services,
)
from hlat.tracking.attempt_start import get_attempt_start_time
from hlat.tracking.console_logger import ConsoleLogger
from hlat.tracking.jsonl_log import NullLog, open_events_log, open_metrics_log
from hlat.tracking.metric_logger import MetricLogger, RunInfo
from hlat.tracking.neuron_monitor import NeuronMonitor
from hlat.tracking.row_validation import Row


class Tracker:
    """Writer of metrics.jsonl and events.jsonl for one attempt; discards rows if not rank 0.

    `attempt` is its number, from 1; `service_run_ids` is set by `start_attempt`. `config_yaml` is
    the composed configuration and `overrides` are those of the user, for tracking services.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        is_rank0: bool = True,
        config_yaml: str = "{}",
        overrides: Sequence[str] = (),
    ) -> None:
        self._is_rank0, self._run_dir, self._config_yaml = is_rank0, run_dir, config_yaml
        self._overrides = tuple(overrides)
        self._metrics_log = open_metrics_log(run_dir) if is_rank0 else NullLog(run_dir)
        self._events_log = open_events_log(run_dir) if is_rank0 else NullLog(run_dir)
        self._config = config
        self._neuron_monitor: NeuronMonitor | None = None
        self._loggers: list[MetricLogger] = []
        self._metadata: tuple[list[str], dict[str, Any]] | None = None
        self._lock: IO[str] | None = None
        self.service_run_ids: dict[str, str] = {}
        self._cost_start_time = time.time()
        events = [row["event"] for row in self._events_log.read_rows()]
        self.attempt = 1 + sum(event in lost_work.START_EVENTS for event in events)
        self._num_scores = events.count(lost_work.SCORE_EVENT)
        self._last_step, self._last_time, self._data_wait_seconds = 0, time.perf_counter(), 0.0

    def start_attempt(
        self, step: int, service_run_ids: Mapping[str, str] | None = None, **details: Any
    ) -> None:
        """Start the attempt after the completed `step` and remove later rows of metrics.jsonl.

        The event contains the start time of the attempt (`began`), the lost work
        (`lost_work.compute_lost_work`) and `details`. `service_run_ids` are those in the
        checkpoint.
        """
        lost_rows = self._repair_metrics(step)
        events, removed = self._events_log.read_rows(), self._metrics_log.truncate_after(step)
        own_rows = lost_work.exclude_scores((*events, *removed))
        earlier = [row for row in own_rows if row["attempt"] < self.attempt]
        began = get_attempt_start_time(max((row["time"] for row in earlier), default=None))
        lost = lost_work.compute_lost_work(removed, events, step) if earlier else {}
        all_rows = (*events, *self._metrics_log.read_rows(), *removed)
        self._cost_start_time = began - lost_work.compute_attempt_seconds(all_rows)
        if self._is_rank0:
            missed_events = lost_work.find_events_after_last_attempt(events)
            self._start_loggers(step, service_run_ids or {}, missed_events, bool(removed))
            self._neuron_monitor = NeuronMonitor()
        self.log_event("resume" if step else "start", step, began=began, **lost, **details)
        if lost_rows:
            self.log_event("lost_rows", step, **lost_rows)
        self.restart_clock(step)

    def write_metadata(self, overrides: list[str], provenance: dict[str, Any]) -> None:
        """Write the metadata files, now and again if the run directory is removed."""
        self._metadata = overrides, provenance
        run_directory.write_run_metadata(
            self._run_dir, self._config_yaml, self._config.extensions, *self._metadata
        )

    def sync(self) -> None:
        """Flush the rows of metrics.jsonl and events.jsonl to disk."""
        self._metrics_log.sync()
        self._events_log.sync()

    def log_ready(self, step: int) -> None:
        """Log the end of the start-up; the time after it is training time."""
        self.log_event("ready", step)
        self.restart_clock(step)

    def add_data_wait(self, seconds: float) -> None:
        """Add the time that a step waited for its batch."""
        self._data_wait_seconds += seconds

    def log_metrics(self, step: int, phase: str, **metrics: Any) -> None:
        """Log the row of `step`; times are means over the steps since the last row."""
        batch, data_wait_seconds = self._config.batch, self._data_wait_seconds
        num_steps, tokens = step - self._last_step, count_tokens(step, batch)
        num_new_tokens = tokens - count_tokens(self._last_step, batch)
        seconds = self.restart_clock(step)
        row = {
            "step": step,
            "tokens": tokens,
            **metrics,
            "tokens_per_second": num_new_tokens / seconds,
            "step_seconds": seconds / num_steps,
            "data_wait_seconds": data_wait_seconds / num_steps,
            "mfu": self._compute_mfu(step, num_new_tokens / seconds),
            **self._compute_cost(tokens),
            **(self._neuron_monitor.get_latest() if self._neuron_monitor else {}),
            "phase": redact_text(phase),
            "attempt": self.attempt,
            "time": time.time(),
        }
        self._restore_run_dir(step)
        self._metrics_log.append(row)
        for logger in self._loggers:
            logger.log_metrics(row)

    def rewind(self, step: int) -> None:
        """Go back to `step` within the attempt and remove later rows of metrics.jsonl.

        The event contains the `seconds` since the last row and the lost work.
        """
        removed = self._metrics_log.truncate_after(step)
        lost = lost_work.compute_lost_work(removed, self._events_log.read_rows(), step)
        for logger in self._loggers:
            logger.rewind(step)
        self.log_event("rewind", step, seconds=self.restart_clock(step), **lost)

    def get_recent_rows(self, count: int) -> list[Row]:
        """Return the last `count` rows of metrics.jsonl, oldest first."""
        return self._metrics_log.read_rows()[-count:]

    def get_events(self, event: str) -> list[Row]:
        """Return the rows of an event of all attempts, oldest first."""
        return [row for row in self._events_log.read_rows() if row["event"] == event]

    def log_event(self, event: str, step: int, **details: Any) -> None:
        """Log an event, and forward the scores that other processes have logged since the last."""
        position = {"step": step, "attempt": self.attempt, "time": time.time()}
        row = {"event": event, **position, **redact_data(details)}
        self._events_log.append(row)
        if not self._loggers:
            return
        scores = self.get_events(lost_work.SCORE_EVENT)
        for logger in self._loggers:
            for one in (row, *scores[self._num_scores :]):
                logger.log_event(one)
        self._num_scores = len(scores)

    def print_message(self, text: str) -> None:
        """Print a message on rank 0, above the progress bar."""
        if self._is_rank0:
            print_line(text)

    def exclude_time(self, since: float) -> float:
        """Exclude the time after `since` (perf_counter) from the training time; return it."""
        seconds = time.perf_counter() - since
        self._last_time += seconds
        return seconds

    def restart_clock(self, step: int) -> float:
        """Start timing the steps after `step`; return the seconds since the last call."""
        now = time.perf_counter()
        seconds = now - self._last_time
        self._last_step, self._last_time, self._data_wait_seconds = step, now, 0.0
        return seconds

    def close(self) -> None:
        """Close the progress display and finish the services."""
        if self._neuron_monitor is not None:
            self._neuron_monitor.close()
        if self._loggers:
            rows, events = self._metrics_log.read_rows(), self._events_log.read_rows()
            summary = summary_metrics.compute_summary_metrics(rows, events)
            for logger in reversed(self._loggers):  # the console last: it displays warnings
                logger.finish(summary)
            self._loggers = []
        if self._lock is not None:
            self._lock.close()

    def _restore_run_dir(self, step: int) -> None:
        """Lock the run directory and write its metadata again if it was removed during the run."""
        if self._metadata is None or run_directory.is_locked_dir(self._run_dir):
            return
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self._lock = run_directory.lock_run_dir(self._run_dir)
        self.write_metadata(*self._metadata)
        self.print_message(
            f"WARNING: {self._run_dir} was removed during the run, with its earlier metrics, "
            "events and checkpoints"
        )
        self.log_event("run_directory_removed", step)

    def _repair_metrics(self, step: int) -> dict[str, int]:
        """Remove damaged and duplicate rows, and compare the rows with the step of the checkpoint.

        A save logs a row first, so rows were lost if the last one is of an earlier step.

        Returns:
            The removed lines and rows, and the first and last step without rows; empty without any.
        """
        damaged, duplicate = self._metrics_log.repair()
        rows = self._metrics_log.read_rows()
        last_step = max((row["step"] for row in rows if row["step"] <= step), default=0)
        lost = {"damaged": damaged, "duplicate": duplicate} if damaged or duplicate else {}
        if last_step < step and self._is_rank0 and self.attempt > 1:
            lost |= {"first_missing": last_step + 1, "last_missing": step}
        if lost:
            details = ", ".join(f"{key} {value}" for key, value in lost.items())
            self.print_message(f"WARNING: metrics.jsonl was damaged: {details}")
        return lost

    def _start_loggers(
        self,
        step: int,
        service_run_ids: Mapping[str, str],
        missed_events: Iterable[Row],
        repeats_rows: bool,
    ) -> None:
        """Start the console and the services, and log `missed_events` to them."""
        config = self._config
        tracking_services.validate_installed_services(config)
        self.service_run_ids = tracking_services.load_service_run_ids(
            config, self._run_dir, service_run_ids
        )
        services = tracking_services.build_metric_loggers(config, self.print_message)
        console = ConsoleLogger(config.tracking.console)
        for name, logger in {"console": console, **services}.items():
            self._loggers.append(logger)
            logger.start(
                RunInfo(
                    run_dir=self._run_dir,
                    name=redact_text(self._run_dir.name),
                    service_run_id=self.service_run_ids.get(name, ""),
                    attempt=self.attempt,
                    step=step,
                    total_steps=compute_total_steps(config),
                    config=redact(self._config_yaml) if services else {},
                    code_revision=provenance.get_git_revision() if services else None,
                    overrides=self._overrides,
                    repeats_rows=repeats_rows,
                )
            )
            for row in missed_events:
                logger.log_event(row)

    def _compute_cost(self, tokens: int) -> dict[str, float | None]:
        """Return the cost of all nodes during all attempts, total and per 4 million tokens."""
        seconds = time.time() - self._cost_start_time
        cost_per_4m = mfu.compute_cost_per_4m_tokens(self._config.hardware, tokens / seconds)
        total = None if cost_per_4m is None else cost_per_4m * tokens / 4e6
        return {"cost_usd": total, "cpt_usd": cost_per_4m}

    def _compute_mfu(self, step: int, tokens_per_second: float) -> float | None:
        """Return the MFU with the sequence length of the last of `step` steps."""
        config = self._config
        length = get_sequence_length(step - 1, config.batch)
        return mfu.compute_mfu(
            tokens_per_second,
            compute_flops_per_token(config.model, length),
            config.hardware,
            config.num_processes,
            config.precision.compute_dtype,
        )
