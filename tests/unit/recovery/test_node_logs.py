"""One log file per node, for any number of its ranks."""

import io
import json
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import start_processes

from hlat.recovery.node_logs import NodeLogs

SCRIPT = "import os, sys; print('line of', os.environ['RANK'], file=sys.stderr)"


def run_workers(logs: NodeLogs, ranks: range) -> None:
    context = start_processes(
        name="hlat",
        entrypoint=sys.executable,
        args=dict.fromkeys(range(len(ranks)), ("-c", SCRIPT)),
        envs={i: {"RANK": str(rank)} for i, rank in enumerate(ranks)},
        logs_specs=logs,
        log_line_prefixes={i: f"[rank {rank}] " for i, rank in enumerate(ranks)},
        duplicate_stderr_filters=[""],
    )
    context.wait()
    context.close()


# TorchElastic does not close the files of its workers
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.slow
def test_a_node_has_one_log_file_with_the_lines_of_all_ranks(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    (tmp_path / "local").mkdir()
    logs = NodeLogs(tmp_path / "logs", tmp_path / "local", 1)
    for _ in range(2):
        run_workers(logs, range(4, 7))
    files = [path for path in (tmp_path / "logs").iterdir() if path.is_file()]
    assert len(files) == 2
    assert logs.log_path in files
    for file in files:  # of the two attempts
        lines = sorted(file.read_text().splitlines())
        assert lines == [f"[rank {rank}] line of {rank}" for rank in range(4, 7)]
    assert json.dumps(sys.stderr.getvalue()).count("line of") == 6
