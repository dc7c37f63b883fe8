"""Supervisor of the worker processes of a run on this node.

TorchElastic starts and stops the workers together. The supervisor decides what their end means. An
exit code that the workers agreed on ends the run. A worker that died or hangs is a logged failure;
the run then restarts from its newest checkpoint unless it keeps failing at the same step. The
supervisors of a job's nodes decide together (failure_coordinator.py).
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

import psutil
import torch
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from hlat.config.config_errors import ConfigError, ExitCode
from hlat.config.redaction import redact_data
from hlat.config.run import Config
from hlat.distributed.heartbeat import Heartbeat, get_heartbeat_path
from hlat.distributed.process_signals import DUMP_SIGNAL, STOP_SIGNALS
from hlat.distributed.rank_environment import (
    PARENT_PID_ENV,
    RECORDS_DIR_ENV,
    STOP_FILE_ENV,
    NodeInfo,
    read_node_info,
)
from hlat.engine.neuron import neuron_environment
from hlat.recovery import host_info, preflight
from hlat.recovery.failure_coordinator import Failure, FailureCoordinator
from hlat.recovery.node_logs import NodeLogs
from hlat.recovery.rendezvous import LocalRendezvous, MultiNodeRendezvous
from hlat.recovery.signal_handler import handle_signals
from hlat.recovery.start_notice import StartNotice
from hlat.recovery.worker_stacks import WorkerStacks
from hlat.tracking import attempt_start, run_directory
from hlat.tracking.jsonl_log import open_events_log, open_metrics_log

_SHUTDOWN_TIMEOUT_S = 5
"""Time for the other workers after one has failed."""
_RECORDS_DIR_PREFIX, _LOCK_FILE = "hlat-supervisor-", "alive"
"""Prefix of the directories of exit records, and the file in each that a live supervisor locks."""


def launch_workers(config: Config, command: list[str]) -> ExitCode:
    """Run this node's workers until they end, with restarts; return the exit code.

    Signals are forwarded to all workers, each of which runs `command`.

    Raises:
        ConfigError: A worker raised it, or this machine lacks the devices of the hardware.
    """
    node = read_node_info()
    if node is None:
        _validate_devices(config)
    if node is not None and node.node_rank > 0:
        return _supervise_workers(config, command, node)
    with run_directory.remove_if_refused(run_directory.build_run_dir(config.run)):
        return _supervise_workers(config, command, node)


def _supervise_workers(config: Config, command: list[str], node: NodeInfo | None) -> ExitCode:
    num_nodes = 1 if node is None else node.num_nodes
    with run_directory.acquire_run_dir(config.run, node is None or node.node_rank == 0) as run_dir:
        pass  # the workers acquire it; acquiring it here reports problems before they start
    num_threads = max(1, (os.cpu_count() or 1) // (config.num_processes // num_nodes))
    with _make_records_dir() as records_dir:
        variables = {
            RECORDS_DIR_ENV: str(records_dir),
            PARENT_PID_ENV: str(os.getpid()),
            attempt_start.START_TIME_VARIABLE: str(attempt_start.get_process_start_time()),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(num_threads)),
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGPROF",  # the supervisor handles the usual ones
            # Libraries read some of these variables when a process starts
            **neuron_environment.build_neuron_environment(config.compiler, config.precision),
        }
        with _set_environment(variables):
            supervisor = Supervisor(config, command, run_dir, records_dir, node)
            with (
                handle_signals(supervisor.forward_signal),
                handle_signals(supervisor.request_stacks, [DUMP_SIGNAL]),
            ):
                return supervisor.supervise()


def _validate_devices(config: Config) -> None:
    """Raise ConfigError if this machine lacks accelerators of the run's hardware.

    The nodes of a job are checked in the pre-flight, which names a faulty one.
    """
    if not preflight.needs_accelerator(config):
        return
    found = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if found < config.num_processes // config.hardware.nodes:
        raise preflight.build_missing_device_error(config.hardware, found)


class Supervisor(LocalElasticAgent):
    """TorchElastic agent with its own rules for hangs and restarts.

    `node` is None if there is a single one; `records_dir` has exit records and heartbeats.

    Raises:
        torch.distributed.DistError: The first node is unreachable.
    """

    def __init__(
        self,
        config: Config,
        command: list[str],
        run_dir: Path,
        records_dir: Path,
        node: NodeInfo | None = None,
    ) -> None:
        # TorchElastic logs every exit code but 0 as an error, after the message of the run itself
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(
            logging.CRITICAL
        )
        rendezvous = MultiNodeRendezvous(node) if node else LocalRendezvous(str(os.getpid()))
        node = rendezvous.node
        local_size = config.num_processes // node.num_nodes
        self._recovery = config.recovery
        self._ranks = range(node.node_rank * local_size, (node.node_rank + 1) * local_size)
        self._is_node_rank0 = node.node_rank == 0
        self._coordinator = FailureCoordinator(node, host_info.get_host_name())
        self._run_dir, self._records_dir = run_dir, records_dir
        self._received_signal: signal.Signals | None = None
        self._signaled_ids: list[int | None] = []
        self._stacks_requested = False
        stacks_path = run_dir / "logs" / f"node_{node.node_rank}.stacks"
        self._stacks = WorkerStacks(self._ranks, records_dir, stacks_path)
        self._start_notice = StartNotice()
        self._hang_reason: str | None = None
        self._num_oom_kills = _count_oom_kills()
        self._failure: Failure | None = None
        self._node_logs = NodeLogs(
            run_dir / "logs", records_dir, node.node_rank, self._prepare_attempt
        )
        spec = WorkerSpec(
            role="hlat",
            local_world_size=local_size,
            entrypoint=command[0],
            args=tuple(command[1:]),
            rdzv_handler=rendezvous,
            max_restarts=config.recovery.max_restarts,
            duplicate_stderr_filters=[""] if self._ranks.stop > 1 else None,  # all lines
        )
        super().__init__(
            spec,
            self._node_logs,
            shutdown_timeout=_SHUTDOWN_TIMEOUT_S,
            log_line_prefix_template="[rank ${rank}] " if config.num_processes > 1 else None,
        )

    def supervise(self) -> ExitCode:
        """Run the workers until they end; return the exit code.

        Raises:
            ConfigError: A worker raised it.
        """
        result = self.run()
        if not result.is_failed():
            record = self._records_dir / f"{self._ranks[0]}.json"
            return ExitCode(json.loads(record.read_text())["exit"])
        failure = self._failure
        assert failure is not None, "_monitor_workers sets it before TorchElastic gives up"
        if failure.problems and self._is_node_rank0:
            raise ConfigError(*failure.problems)
        if self._received_signal is not None or failure.exit is ExitCode.PREEMPTED:
            return ExitCode.PREEMPTED
        if self._is_node_rank0:
            print(f"hlat: {failure.trace or failure.reason}".rstrip(), file=sys.stderr)
        return failure.exit

    def forward_signal(self, signum: int, frame: FrameType | None) -> None:
        """Forward a signal to all workers and prevent restarts."""
        self._received_signal = signal.Signals(signum)
        self._signaled_ids = self._worker_ids
        self._send_signals(self._received_signal)

    def request_stacks(self, signum: int, frame: FrameType | None) -> None:
        """Write the stacks of all workers to the log of the node; they continue."""
        self._stacks_requested = True

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        store: Any = worker_group.store
        self._coordinator.attach_store(store)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        local_failure = None
        if result.state is WorkerState.HEALTHY:
            self._forward_stop_request()
            self._forward_early_signal()
            self._collect_requested_stacks()
            self._print_start_notice()
            self._kill_if_hung()
            if not self._coordinator.has_failure():
                return result
        elif result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            local_failure = self._diagnose_failure(result.failures)
        else:
            return result
        self._failure, restart = self._coordinator.resolve_failure(local_failure, self._may_restart)
        if not restart:
            self._remaining_restarts = 0
        return RunResult(WorkerState.FAILED, failures=result.failures)

    def _forward_stop_request(self) -> None:
        """Send SIGUSR2 to the workers once the launcher has created its stop file."""
        stop_file = os.environ.get(STOP_FILE_ENV, "")
        is_responsible = self._is_node_rank0 and self._received_signal is None
        if is_responsible and stop_file and Path(stop_file).exists():
            self.forward_signal(signal.SIGUSR2, None)

    def _forward_early_signal(self) -> None:
        """Forward a signal that this process received before the workers started."""
        if self._received_signal is not None and self._signaled_ids != self._worker_ids:
            self.forward_signal(self._received_signal, None)

    def _collect_requested_stacks(self) -> None:
        """Collect the stacks of all workers if this process or a worker received `DUMP_SIGNAL`."""
        if self._stacks_requested or self._stacks.has_new():
            self._stacks_requested = False
            self._send_signals(DUMP_SIGNAL)
            self._stacks.collect()
            print(f"hlat: stacks of all ranks are in {self._stacks.path}", file=sys.stderr)

    def _print_start_notice(self) -> None:
        """Print the calls of all workers if one has not started within minutes."""
        if not self._stacks.are_enabled or not self._start_notice.is_due():
            return
        if not all(self._open_heartbeat(rank).has_started for rank in self._ranks):
            self._send_signals(DUMP_SIGNAL)
            stacks = self._stacks.collect()
            message = self._start_notice.format_message(stacks, self._stacks.path)
            print(message, file=sys.stderr)

    def _kill_if_hung(self) -> None:
        """Kill all workers after a dump of their stacks if the heartbeat of one has expired."""
        hung = [str(rank) for rank in self._ranks if self._open_heartbeat(rank).is_expired()]
        if not hung:
            return
        self._hang_reason = (
            f"no heartbeat from rank {' and '.join(hung)} for "
            f"recovery.step_timeout_s={self._recovery.step_timeout_s:g} (start_timeout_s="
            f"{self._recovery.start_timeout_s:g} during start-up, evaluations and saves); stacks "
            f"of all ranks are in {self._run_dir / 'logs'}"
        )
        # SIGCONT wakes a stopped worker, which would then go on, so SIGKILL follows
        self._send_signals(DUMP_SIGNAL, signal.SIGCONT)
        self._stacks.collect()
        self._send_signals(signal.SIGKILL)

    def _may_restart(self, failure: Failure) -> bool:
        """Return True if the run may restart after a failure, and log the decision."""
        if failure.problems or failure.exit is not ExitCode.FAILED:
            return False
        if self._received_signal is not None or self._remaining_restarts == 0:
            return False
        events, metrics = open_events_log(self._run_dir), open_metrics_log(self._run_dir)
        rows, recovery = events.read_rows(), self._recovery
        step = int((metrics.read_rows() or [{"step": 0}])[-1]["step"])
        num_failures = 1 + sum(
            row["event"] == "restart" and (row.get("reason"), row["step"]) == (failure.reason, step)
            for row in rows
        )
        count = recovery.max_restarts - self._remaining_restarts + 1
        restart = bool(num_failures < recovery.max_same_failures)
        action = (
            f"; restarting from the newest checkpoint (restart {count} of {recovery.max_restarts})"
            if restart
            else f": failed {num_failures} times at step {step}, so the run ends "
            f"(recovery.max_same_failures={recovery.max_same_failures})"
        )
        print(f"hlat: {failure.reason}{action}", file=sys.stderr)
        attempt = next((row["attempt"] for row in reversed(rows) if "attempt" in row), 0)
        details = {"step": step, "attempt": attempt, "time": time.time(), "reason": failure.reason}
        events.append({"event": "restart" if restart else "give_up", **redact_data(details)})
        return restart

    def _diagnose_failure(self, failures: Mapping[int, ProcessFailure]) -> Failure:
        """Return the first failure among the workers of this node."""
        now = time.time()
        if self._hang_reason is not None:
            return Failure(self._hang_reason, killed=True, time=now)
        killed = {
            rank: -worker.exitcode for rank, worker in failures.items() if worker.exitcode < 0
        }
        records = {
            path.stem: json.loads(path.read_text()) for path in self._records_dir.glob("*.json")
        }
        raised = {name: record for name, record in records.items() if "trace" in record}
        # TorchElastic ends the peers of a rank that raises by SIGTERM; peers of a killed rank raise
        if killed and not (raised and {*killed.values()} == {signal.SIGTERM}):
            rank, signum = min(killed.items(), key=lambda item: (item[1] == signal.SIGTERM, item))
            reason = f"rank {rank} was killed by {signal.Signals(signum).name}"
            if _count_oom_kills() > self._num_oom_kills and signum == signal.SIGKILL:
                reason += " (out of memory)"
            if signum == signal.SIGBUS:
                reason += " (a mapped file was truncated, or its disk is full or failed)"
            # A stop signal so early that the worker did not handle it
            is_stopped = signum in STOP_SIGNALS and killed.keys() == failures.keys()
            exit_code = ExitCode.PREEMPTED if is_stopped else ExitCode.FAILED
            return Failure(reason, exit=exit_code, killed=signum != signal.SIGTERM, time=now)
        if raised:
            name, record = min(raised.items(), key=lambda item: item[1]["time"])
            reason = f"rank {name} raised {record['trace'].rstrip().splitlines()[-1]}"
            trace = f"rank {name} failed:\n{record['trace']}"
            problems = tuple(record["problems"] or ())
            return Failure(reason, trace, problems, ExitCode(record["exit"]), time=record["time"])
        rank = min(failures)
        code = failures[rank].exitcode
        has_meaning = code in (ExitCode.UNHEALTHY_NODE, ExitCode.PREEMPTED)
        exit_code = ExitCode(code) if has_meaning else ExitCode.FAILED
        return Failure(f"rank {rank} exited with code {code}", exit=exit_code, time=now)

    def _prepare_attempt(self) -> None:
        """Remove the files of the last attempt and apply the start timeout."""
        for record in self._records_dir.glob("*.json"):
            record.unlink()
        self._hang_reason, self._num_oom_kills = None, _count_oom_kills()
        recovery = self._recovery
        timeout_s = None if recovery.step_timeout_s is None else recovery.start_timeout_s
        self._stacks.remove()
        self._start_notice.restart()
        for rank in self._ranks:
            heartbeat = self._open_heartbeat(rank)
            heartbeat.has_started = False
            heartbeat.set_deadline(timeout_s)

    def _open_heartbeat(self, rank: int) -> Heartbeat:
        return Heartbeat(get_heartbeat_path(self._records_dir, rank))

    @property
    def _worker_ids(self) -> list[int | None]:
        return [worker.id for worker in self.get_worker_group().workers]

    def _send_signals(self, *signals: signal.Signals) -> None:
        for process_id in self._worker_ids:
            for signum in signals:
                with suppress(ProcessLookupError):
                    if process_id is not None:
                        os.kill(process_id, signum)


def _count_oom_kills() -> int:
    """Return the number of out-of-memory kills since Linux was started; 0 on other systems."""
    with suppress(OSError):
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counters.get("oom_kill", 0))
    return 0


@contextmanager
def _make_records_dir() -> Iterator[Path]:
    """Create a locked temporary directory; remove those of killed supervisors and their workers."""
    for lock in Path(tempfile.gettempdir()).glob(f"{_RECORDS_DIR_PREFIX}*/{_LOCK_FILE}"):
        with suppress(OSError), lock.open() as file:  # another user's, or still locked
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _kill_orphans(lock.parent)
            shutil.rmtree(lock.parent)
    with tempfile.TemporaryDirectory(prefix=_RECORDS_DIR_PREFIX) as name:
        records_dir = Path(name)
        with (records_dir / ".alive").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            (records_dir / ".alive").rename(records_dir / _LOCK_FILE)  # it appears locked
            yield records_dir


def _kill_orphans(records_dir: Path) -> None:
    """Kill workers that were stopped and therefore survived their supervisor."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # another user's, or just ended
            if process.environ().get(RECORDS_DIR_ENV) == str(records_dir):
                process.kill()


@contextmanager
def _set_environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables within the context."""
    previous = os.environ.copy()
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(previous)
