"""Supervisor of the worker processes of a run on this node.

TorchElastic starts and stops the workers together. The supervisor decides what their end means. An
exit code that the workers agreed on ends the run. A worker that died or hangs is a logged failure;
the run then restarts from its newest checkpoint unless it keeps failing at the same step. The
supervisors of a job's nodes decide together (failure_coordinator.py).
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState

from hlat.config.config_errors import ConfigError, ExitCode
from hlat.config.redaction import redact_data
from hlat.config.run import Config
from hlat.distributed.heartbeat import Heartbeat, get_heartbeat_path
from hlat.distributed.process_signals import DUMP_SIGNAL
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
from hlat.recovery.failure_diagnosis import count_oom_kills, diagnose_failure
from hlat.recovery.node_logs import NodeLogs
from hlat.recovery.records_directory import create_records_dir
from hlat.recovery.rendezvous import LocalRendezvous, MultiNodeRendezvous
from hlat.recovery.signal_handler import handle_signals
from hlat.recovery.start_notice import StartNotice
from hlat.recovery.worker_agent import WorkerAgent
from hlat.recovery.worker_stacks import WorkerStacks
from hlat.tracking import attempt_start, run_directory
from hlat.tracking.jsonl_log import open_events_log, open_metrics_log

_SHUTDOWN_TIMEOUT_S = 5
"""Time for the workers to end after an exception in this process."""


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
    with create_records_dir() as records_dir:
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


class Supervisor:
    """Workers of this node, which TorchElastic starts, with rules for hangs and restarts.

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
        self._num_oom_kills = count_oom_kills()
        self._failure: Failure | None = None
        spec = WorkerSpec(
            role="hlat",
            local_world_size=local_size,
            entrypoint=command[0],
            args=tuple(command[1:]),
            rdzv_handler=rendezvous,
            max_restarts=config.recovery.max_restarts,
            duplicate_stderr_filters=[""] if self._ranks.stop > 1 else None,  # all lines
        )
        self._agent = WorkerAgent(
            spec,
            NodeLogs(run_dir / "logs", records_dir, node.node_rank, self._prepare_attempt),
            self._check_workers,
            shutdown_timeout=_SHUTDOWN_TIMEOUT_S,
            log_line_prefix_template="[rank ${rank}] " if config.num_processes > 1 else None,
        )

    def supervise(self) -> ExitCode:
        """Run the workers until they end; return the exit code.

        Raises:
            ConfigError: A worker raised it.
        """
        result = self._agent.run()
        if not result.is_failed():
            record = self._records_dir / f"{self._ranks[0]}.json"
            return ExitCode(json.loads(record.read_text())["exit"])
        failure = self._failure
        assert failure is not None, "_check_workers sets it before TorchElastic gives up"
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

    def _prepare_attempt(self) -> None:
        """Use the store of this attempt, remove the last one's files, apply the start timeout."""
        store: Any = self._agent.get_worker_group().store
        self._coordinator.attach_store(store)
        for record in self._records_dir.glob("*.json"):
            record.unlink()
        self._hang_reason, self._num_oom_kills = None, count_oom_kills()
        recovery = self._recovery
        timeout_s = None if recovery.step_timeout_s is None else recovery.start_timeout_s
        self._stacks.remove()
        self._start_notice.restart()
        for rank in self._ranks:
            heartbeat = self._open_heartbeat(rank)
            heartbeat.has_started = False
            heartbeat.set_deadline(timeout_s)

    def _check_workers(self, result: RunResult) -> RunResult:
        """Return the state of the workers, with a failure of this node or of another one."""
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
            local_failure = self._diagnose_failure(result)
        else:
            return result
        self._failure, restart = self._coordinator.resolve_failure(local_failure, self._may_restart)
        if not restart:
            self._agent.prevent_restarts()
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

    def _diagnose_failure(self, result: RunResult) -> Failure:
        """Return the first failure among the workers of this node."""
        if self._hang_reason is not None:
            return Failure(self._hang_reason, killed=True, time=time.time())
        exit_codes = {rank: worker.exitcode for rank, worker in result.failures.items()}
        return diagnose_failure(exit_codes, self._records_dir, self._num_oom_kills)

    def _may_restart(self, failure: Failure) -> bool:
        """Return True if the run may restart after a failure, and log the decision."""
        if failure.problems or failure.exit is not ExitCode.FAILED:
            return False
        if self._received_signal is not None or self._agent.remaining_restarts == 0:
            return False
        events, metrics = open_events_log(self._run_dir), open_metrics_log(self._run_dir)
        rows, recovery = events.read_rows(), self._recovery
        step = int((metrics.read_rows() or [{"step": 0}])[-1]["step"])
        num_failures = 1 + sum(
            row["event"] == "restart" and (row.get("reason"), row["step"]) == (failure.reason, step)
            for row in rows
        )
        count = recovery.max_restarts - self._agent.remaining_restarts + 1
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

    def _open_heartbeat(self, rank: int) -> Heartbeat:
        return Heartbeat(get_heartbeat_path(self._records_dir, rank))

    @property
    def _worker_ids(self) -> list[int | None]:
        return [worker.id for worker in self._agent.get_worker_group().workers]

    def _send_signals(self, *signals: signal.Signals) -> None:
        for process_id in self._worker_ids:
            for signum in signals:
                with suppress(ProcessLookupError):
                    if process_id is not None:
                        os.kill(process_id, signum)


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
