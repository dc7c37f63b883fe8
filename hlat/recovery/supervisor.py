"""Starts the processes of a run on this machine, watches them, and starts them again.

TorchElastic starts and ends them together. What became of them is decided here: what they agreed
on is the run's end; a process that died or hangs is a failure, told on the console and in
events.jsonl, and the run goes on from its newest checkpoint unless it keeps failing alike. In a job
of several nodes one supervisor on each does this for its own, and all of them decide together.
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
from hlat.engine.processes import PARENT, RECORDS, STOP, Node, Pulse, node, pulse_file
from hlat.recovery import host
from hlat.recovery.council import Alone, Council, Failure
from hlat.recovery.rendezvous import LocalRendezvous, NodesRendezvous
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


def start(config: Config, command: list[str]) -> Exit:
    """Start this node's processes of a run, see to it that they end well, and return the exit code.

    A signal goes on to all of them, and they decide together what becomes of it.

    Args:
        config: The run.
        command: What each of them runs.

    Raises:
        ConfigError: One of them raised it.
    """
    here = node()
    with run_folder.claimed(config.run, here is None or here.rank == 0) as folder:
        pass  # those that train hold it; here a mistake is told before they start
    num_processes = config.num_processes // (1 if here is None else here.size)
    threads = max(1, (os.cpu_count() or 1) // num_processes)
    with _record_folder() as records:
        variables = {
            RECORDS: str(records),
            PARENT: str(os.getpid()),
            beginning.VARIABLE: str(beginning.process_began()),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",  # the others are ours
        }
        with _environment(variables):
            supervisor = Supervisor(config, command, folder, records, here)
            with _handling(supervisor.pass_on):
                return supervisor.supervise()


class Supervisor(LocalElasticAgent):
    """TorchElastic's agent, with a mind of its own about hangs and restarts."""

    def __init__(
        self,
        config: Config,
        command: list[str],
        folder: Path,
        records: Path,
        here: Node | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            config: The run.
            command: What each process runs.
            folder: The run's folder.
            records: Where processes leave word of how they end.
            here: This node among those of a job; None: it is the only one.

        Raises:
            torch.distributed.DistError: The first node cannot be reached.
        """
        # It logs every exit code but 0 as an error, below what the run has said itself
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(
            logging.CRITICAL
        )
        rank, size = (0, 1) if here is None else (here.rank, here.size)
        each = config.num_processes // size
        self._recovery, self._ranks = config.recovery, range(rank * each, (rank + 1) * each)
        self._leads = rank == 0
        self._council = Alone() if here is None else Council(here, host.name())
        self._folder, self._records = folder, records
        self._signal: str | None = None
        self._hangs: str | None = None
        self._oom_kills = _oom_kills()
        self._failure: Failure | None = None
        run_id = str(os.getpid()) if here is None else "nodes"
        meeting = LocalRendezvous(run_id) if here is None else NodesRendezvous(here, run_id)
        spec = WorkerSpec(
            role="hlat",
            local_world_size=each,
            entrypoint=command[0],
            args=tuple(command[1:]),
            rdzv_handler=meeting,
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
            record = self._records / f"{self._ranks[0]}.json"
            return Exit(json.loads(record.read_text())["exit"])
        failure = self._failure
        assert failure is not None, "it was seen before TorchElastic gave up"
        if failure.problems and self._leads:
            raise ConfigError(*failure.problems)
        if self._signal is not None:
            return Exit.PREEMPTED
        if self._leads:
            print(f"hlat: {failure.trace or failure.reason}".rstrip(), file=sys.stderr)
        return failure.exit

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """Send a signal on to all processes; none is started after it."""
        self._signal = signal.Signals(number).name
        self._send(signal.Signals(number))

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        store: Any = worker_group.store
        self._council.begin(store)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        own = None
        if result.state is WorkerState.HEALTHY:
            self._stop_if_asked()
            self._end_if_hung()
            if not self._council.troubled():
                return result
        elif result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            own = self._describe(result.failures)
        else:
            return result
        self._failure, restart = self._council.agree(own, self._may_restart)
        if not restart:
            self._remaining_restarts = 0
        return RunResult(WorkerState.FAILED, failures=result.failures)

    def _stop_if_asked(self) -> None:
        """Let the run save and end once the file is there by which a launcher asks for it."""
        asked = os.environ.get(STOP)
        if self._leads and self._signal is None and asked is not None and Path(asked).exists():
            self.pass_on(signal.SIGUSR2, None)

    def _end_if_hung(self) -> None:
        """End all processes if one has not been heard of for too long; they tell where they are."""
        late = [rank for rank in self._ranks if self._pulse(rank).late()]
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
        files = [self._folder / "logs" / f"rank_{rank}.stacks" for rank in self._ranks]
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
        final = failure.problems or failure.exit is not Exit.FAILED
        if final or self._signal is not None or self._remaining_restarts == 0:
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
        now = time.time()
        if self._hangs is not None:
            return Failure(self._hangs, killed=True, time=now)
        killed = {rank: -f.exitcode for rank, f in failures.items() if f.exitcode < 0}
        told = [(json.loads(path.read_text()), path.stem) for path in self._records.glob("*.json")]
        raised = [(record, rank) for record, rank in told if "trace" in record]
        # A rank that raises has its peers ended by SIGTERM; a rank that is killed lets them raise
        if killed and not (raised and {*killed.values()} == {signal.SIGTERM}):
            by_us = signal.SIGTERM  # what TorchElastic ends the others with
            number, by = min(killed.items(), key=lambda one: (one[1] == by_us, one))
            out_of_memory = _oom_kills() > self._oom_kills and by == signal.SIGKILL
            why = " for want of memory" if out_of_memory else ""
            reason = f"rank {number} was ended by {signal.Signals(by).name}{why}"
            return Failure(reason, killed=by != signal.SIGTERM, time=now)
        if raised:
            first, rank = min(raised, key=lambda pair: pair[0]["time"])
            reason = f"rank {rank} raised {first['trace'].rstrip().splitlines()[-1]}"
            trace = f"rank {rank} failed:\n{first['trace']}"
            problems = tuple(first["problems"] or ())
            exit_code = Exit.CONFIGURATION if problems else Exit.FAILED
            return Failure(reason, trace, problems, exit_code, time=first["time"])
        number = min(failures)
        reason = f"rank {number} exited with code {failures[number].exitcode}"
        unhealthy = failures[number].exitcode == Exit.UNHEALTHY_NODE
        return Failure(reason, exit=Exit.UNHEALTHY_NODE if unhealthy else Exit.FAILED, time=now)

    def _prepare(self) -> None:
        """Forget the last attempt, and give the next one time to start."""
        for record in self._records.glob("*.json"):
            record.unlink()
        self._hangs, self._oom_kills = None, _oom_kills()
        watched = self._recovery.step_timeout_s is not None
        for rank in self._ranks:
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
        for i, variables in envs.items():
            rank = int(variables["RANK"])
            log = self._folder / f"rank_{rank}.log"
            _put_aside(log)
            destination.stdouts[i] = os.devnull if rank else ""
            destination.stderrs[i] = str(log) if rank else ""
            if rank:
                destination.tee_stderrs[i] = str(log)
            destination.error_files[i] = os.devnull
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
