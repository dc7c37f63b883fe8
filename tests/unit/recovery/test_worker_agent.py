"""Restarts of failed workers."""

from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec

from hlat.recovery.node_logs import NodeLogs
from hlat.recovery.rendezvous import LocalRendezvous
from hlat.recovery.worker_agent import WorkerAgent


# TorchElastic does not close the files of its workers
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_failed_workers_restart_until_restarts_are_prevented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGPROF")
    remaining = []

    def check_workers(result: RunResult) -> RunResult:
        if result.is_failed():
            remaining.append(agent.remaining_restarts)
            if len(remaining) == 2:
                agent.prevent_restarts()
        return result

    spec = WorkerSpec("hlat", 1, LocalRendezvous("test"), entrypoint="false", max_restarts=5)
    agent = WorkerAgent(spec, NodeLogs(tmp_path / "logs", tmp_path, 0), check_workers)
    assert agent.run().is_failed()
    assert remaining == [5, 4]
