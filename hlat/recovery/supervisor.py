"""Starts the processes of a run on this machine, watches them, and starts them again.

TorchElastic starts and ends them together. What became of them is decided here: what they agreed
on is the run's end; a process that died or hangs is a failure, told on the console and in
events.jsonl, and the run goes on from its newest checkpoint unless it keeps failing alike.
"""

import fcntl
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from hlat.config.errors import ConfigError, Exit
from hlat.config.run import Config
from hlat.engine.processes import PARENT, RECORDS, Pulse, pulse_file
from hlat.recovery.rendezvous import LocalRendezvous
from hlat.recovery.watchdog import DUMP
from hlat.tracking import beginning, run_folder
from hlat.tracking.journal import Journal

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
_SECONDS_TO_END = 5
"""Given to the others when one has failed; what can be saved was saved before."""
_SECONDS_TO_DUMP, _SECONDS_BETWEEN_LOOKS = 2, 0.1
"""Given to processes that hang for writing where, and how often it is looked at what they wrote."""
_RECORD_FOLDERS, _ALIVE = "hlat-supervisor-", "alive"
"""Beginning of their names, and the file in each that its supervisor holds while it lives."""


@dataclass(frozen=True)
class Failure:
    """Why processes ended without having agreed to.

    Attributes:
        reason: In one line.
        trace: Of the exception that was raised first; empty if none was.
        problems: Of a mistake in the configuration, which no restart mends.
    """

    reason: str
    trace: str = ""
    problems: tuple[str, ...] = ()


def start(config: Config, command: list[str]) -> Exit:
    """Start the processes of a run, see to it that they end well, and return the exit code.

    A signal goes on to all of them, and they decide together what becomes of it.

    Args:
        config: The run.
        command: What each of them runs.

    Raises:
        ConfigError: One of them raised it.
    """
    with run_folder.claimed(config.run) as folder:
        pass  # those that train hold it; here a mistake is told before they start
    threads = max(1, (os.cpu_count() or 1) // config.num_processes)
    with _record_folder() as records:
        variables = {
            RECORDS: str(records),
            PARENT: str(os.getpid()),
            beginning.VARIABLE: str(beginning.process_began()),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",  # the others are ours
        }
        with _environment(variables):
            supervisor = Supervisor(config, command, folder, records)
            with _handling(supervisor.pass_on):
                return supervisor.supervise()


class Supervisor(LocalElasticAgent):
    """TorchElastic's agent, with a mind of its own about hangs and restarts."""

    def __init__(self, config: Config, command: list[str], folder: Path, records: Path) -> None:
        """Start nothing yet.

        Args:
            config: The run.
            command: What each process runs.
            folder: The run's folder.
            records: Where processes leave word of how they end.
        """
        # It logs every exit code but 0 as an error, below what the run has said itself
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(
            logging.CRITICAL
        )
        self._recovery, self._num_processes = config.recovery, config.num_processes
        self._folder, self._records = folder, records
        self._signal: str | None = None
        self._hangs: str | None = None
        self._oom_kills = _oom_kills()
        self._failure: Failure | None = None
        spec = WorkerSpec(
            role="hlat",
            local_world_size=config.num_processes,
            entrypoint=command[0],
            args=tuple(command[1:]),
            rdzv_handler=LocalRendezvous(str(os.getpid())),
            max_restarts=config.recovery.max_restarts,
        )
        super().__init__(
            spec,
            _Logs(folder / "logs", self._prepare),
            shutdown_timeout=_SECONDS_TO_END,
            log_line_prefix_template="[rank ${rank}] " if config.num_processes > 1 else None,
        )

    def supervise(self) -> Exit:
        """Start the processes and wait for the last of them; return the exit code.

        Raises:
            ConfigError: One of them raised it.
        """
        result = self.run()
        if not result.is_failed():
            return Exit(json.loads((self._records / "0.json").read_text())["exit"])
        failure = self._failure or self._describe(result.failures)
        if failure.problems:
            raise ConfigError(*failure.problems)
        if self._signal is not None:
            return Exit.PREEMPTED
        print(f"hlat: {failure.trace or failure.reason}".rstrip(), file=sys.stderr)
        return Exit.FAILED

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """Send a signal on to all processes; none is started after it."""
        self._signal = signal.Signals(number).name
        self._send(signal.Signals(number))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.HEALTHY:
            self._end_if_hung()
        elif result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            self._failure = self._describe(result.failures)
            if not self._may_restart(self._failure):
                self._remaining_restarts = 0
        return result

    def _end_if_hung(self) -> None:
        """End all processes if one has not been heard of for too long; they tell where they are."""
        late = [rank for rank in range(self._num_processes) if self._pulse(rank).late()]
        if not late:
            return
        self._hangs = (
            f"nothing was heard of rank {' and '.join(map(str, late))} for "
            f"recovery.step_timeout_s={self._recovery.step_timeout_s:g} (or start_timeout_s="
            f"{self._recovery.start_timeout_s:g} where more than a step is done); stacks of all "
            f"ranks are in {self._folder / 'logs'}"
        )
        before = self._stacks()
        self._send(DUMP, signal.SIGCONT)  # one that was stopped wakes up for it, and would go on
        self._wait_for_stacks(before)
        self._send(signal.SIGKILL)

    def _wait_for_stacks(self, before: list[int]) -> None:
        """Wait until all processes have written where they are, but not for long."""
        deadline, last = time.monotonic() + _SECONDS_TO_DUMP, before
        while time.monotonic() < deadline:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            now = self._stacks()
            if now == last and all(size > was for size, was in zip(now, before, strict=True)):
                return
            last = now

    def _stacks(self) -> list[int]:
        """Bytes that each process has written of where it is."""
        files = [
            self._folder / "logs" / f"rank_{rank}.stacks" for rank in range(self._num_processes)
        ]
        return [file.stat().st_size if file.exists() else 0 for file in files]

    def _may_restart(self, failure: Failure) -> bool:
        """Decide, and write down, whether to start again after a failure."""
        events = Journal(self._folder / "events.jsonl")
        rows, step = events.rows(), self._last_step()
        alike = [
            row
            for row in rows
            if row["event"] == "restart" and (row["reason"], row["step"]) == (failure.reason, step)
        ]
        if failure.problems or self._signal is not None or self._remaining_restarts == 0:
            return False
        row = {"step": step, "attempt": rows[-1]["attempt"] if rows else 0, "time": time.time()}
        if len(alike) + 1 >= self._recovery.max_same_failures:
            sentence = (
                f"this has happened {len(alike) + 1} times at step {step}, so the run ends "
                f"(recovery.max_same_failures={self._recovery.max_same_failures})"
            )
            print(f"hlat: {failure.reason}: {sentence}", file=sys.stderr)
            events.append({"event": "give_up", **row, "reason": failure.reason})
            return False
        count = self._recovery.max_restarts - self._remaining_restarts + 1
        print(
            f"hlat: {failure.reason}; going on from the newest checkpoint (restart {count} of "
            f"{self._recovery.max_restarts})",
            file=sys.stderr,
        )
        events.append({"event": "restart", **row, "reason": failure.reason})
        return True

    def _describe(self, failures: Mapping[int, ProcessFailure]) -> Failure:
        """What went wrong first."""
        if self._hangs is not None:
            return Failure(self._hangs)
        killed = {rank: -f.exitcode for rank, f in failures.items() if f.exitcode < 0}
        told = [(json.loads(path.read_text()), path.stem) for path in self._records.glob("*.json")]
        raised = [(record, rank) for record, rank in told if "trace" in record]
        # A rank that raises has its peers ended by SIGTERM; a rank that is killed lets them raise
        if killed and not (raised and {*killed.values()} == {signal.SIGTERM}):
            by_us = signal.SIGTERM  # what TorchElastic ends the others with
            number, by = min(killed.items(), key=lambda one: (one[1] == by_us, one))
            out_of_memory = _oom_kills() > self._oom_kills and by == signal.SIGKILL
            why = " for want of memory" if out_of_memory else ""
            return Failure(f"rank {number} was ended by {signal.Signals(by).name}{why}")
        if raised:
            first, rank = min(raised, key=lambda pair: pair[0]["time"])
            reason = f"rank {rank} raised {first['trace'].rstrip().splitlines()[-1]}"
            trace = f"rank {rank} failed:\n{first['trace']}"
            return Failure(reason, trace, tuple(first["problems"] or ()))
        number = min(failures)
        return Failure(f"rank {number} exited with code {failures[number].exitcode}")

    def _prepare(self) -> None:
        """Forget the last attempt, and give the next one time to start."""
        for record in self._records.glob("*.json"):
            record.unlink()
        self._hangs, self._oom_kills = None, _oom_kills()
        watched = self._recovery.step_timeout_s is not None
        for rank in range(self._num_processes):
            self._pulse(rank).expect(self._recovery.start_timeout_s if watched else None)

    def _pulse(self, rank: int) -> Pulse:
        return Pulse(pulse_file(self._records, rank))

    def _last_step(self) -> int:
        """The last step that was logged; 0 before the first."""
        rows = Journal(self._folder / "metrics.jsonl").rows()
        return int(rows[-1]["step"]) if rows else 0

    def _send(self, *signals: signal.Signals) -> None:
        for worker in self.get_worker_group().workers:
            for number in signals:
                with suppress(ProcessLookupError):
                    if worker.id is not None:
                        os.kill(worker.id, number)


class _Logs(DefaultLogsSpecs):
    """The first rank on the console, the others' stderr there as well, and beside the run."""

    def __init__(self, logs: Path, prepare: Any) -> None:
        super().__init__(str(logs))
        self._folder, self._prepare = logs, prepare

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Where the output of each process goes, just before they start."""
        self._prepare()
        destination = LogsDest()
        for rank in envs:
            log = self._folder / f"rank_{rank}.log"
            _put_aside(log)
            destination.stdouts[rank] = os.devnull if rank else ""
            destination.stderrs[rank] = str(log) if rank else ""
            if rank:
                destination.tee_stderrs[rank] = str(log)
            destination.error_files[rank] = os.devnull
        return destination


def _put_aside(log: Path) -> None:
    """Keep what an earlier attempt has written: rank_1.log becomes rank_1.<seconds>.log."""
    if log.exists() and (state := log.stat()).st_size:
        log.rename(log.with_suffix(f".{state.st_mtime_ns // 10**9}.log"))


def _oom_kills() -> int:
    """Processes that Linux has killed for want of memory since it was started; elsewhere 0."""
    with suppress(OSError):
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counters.get("oom_kill", 0))
    return 0


@contextmanager
def _record_folder() -> Iterator[Path]:
    """A folder for what processes leave word in; what supervisors that were killed left goes."""
    for alive in Path(tempfile.gettempdir()).glob(f"{_RECORD_FOLDERS}*/{_ALIVE}"):
        with suppress(OSError), alive.open() as file:  # of another user, or still held
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _end_orphans(alive.parent)
            shutil.rmtree(alive.parent)
    with tempfile.TemporaryDirectory(prefix=_RECORD_FOLDERS) as made:
        folder = Path(made)
        with (folder / ".alive").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            (folder / ".alive").rename(folder / _ALIVE)  # nobody ever finds it unheld
            yield folder


def _end_orphans(records: Path) -> None:
    """End processes whose supervisor is gone, and who did not notice since they were stopped."""
    variable = os.fsencode(f"{RECORDS}={records}")
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # of another user, or just ended
            if variable in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables for those that are started meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _handling(handler: Any) -> Iterator[None]:
    """Let a function hear of signals."""
    before = {number: signal.signal(number, handler) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
