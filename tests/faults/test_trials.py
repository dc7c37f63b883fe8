"""A part of the reduced fault matrix, and a minute of random faults."""

import json
import os
import subprocess
import sys

import pytest

from tests.faults import matrix, soak
from tests.faults.trials import REPOSITORY, Workspace

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.xdist_group("trials")]


FAULTS_WITHOUT_OTHER_TEST = (
    *("kill -9, supervised", "damaged checkpoint, rejected", "power failure (ext4 shutdown)"),
    *("disk read-only at times", "permission missing", "clock and file times jump"),
)


def test_faults_of_machine_and_clock(tmp_path):
    """Start a separate process, because runs are forked from it."""
    output = tmp_path / "matrix.json"
    command = [sys.executable, "-m", "tests.faults.matrix", "--reduced", "--output", str(output)]
    command += ["--fault", *FAULTS_WITHOUT_OTHER_TEST]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    found = json.loads(output.read_text())
    failed = [
        problem
        for cells in found["faults"].values()
        for c in cells.values()
        for problem in c["failed"]
    ]
    assert not failed
    assert done.returncode == 0, done.stderr
    assert {*found["faults"], *found["skipped"]} == {*FAULTS_WITHOUT_OTHER_TEST}
    assert all(c["passed"] for cells in found["faults"].values() for c in cells.values())


def test_a_failed_trial_fails_the_command(tmp_path, monkeypatch):
    """Count a trial that raises as failed, and continue an interrupted matrix."""
    monkeypatch.setattr(
        matrix,
        "FAULTS",
        {
            "good": matrix.Fault(lambda *_: ["", ""], 3, ("a", "b")),
            "bad": matrix.Fault(lambda *_: ["", "lost.txt"], 2, ("a",)),
            "error": matrix.Fault(lambda *_: [1 / 0], 1, ("a",)),
            "no": matrix.Fault(lambda *_: [], 1, ("a",), lambda: "it needs root"),
        },
    )
    path, workspace = tmp_path / "matrix.json", Workspace(tmp_path / "trials")
    for _ in range(2):
        results = matrix.Results(path)
        matrix.run_matrix(workspace, [*matrix.FAULTS], results, float("inf"))
        cells = results.document["faults"]
        assert cells["good"] == {name: {"runs": 1, "passed": 2, "failed": []} for name in "ab"}
        assert cells["bad"]["a"] == {"runs": 1, "passed": 1, "failed": ["lost.txt"]}
        assert cells["error"]["a"]["failed"] == ["ZeroDivisionError: division by zero"]
        assert results.document["skipped"] == {"no": "it needs root"}
    assert "| all |  | 7 | 5 | 2 |" in matrix.render(results.document)


def test_goodput_accounts_for_a_minute_of_faults(tmp_path):
    soaked = soak.Soak(Workspace(tmp_path / "trials"), mean_s=12, seed=5)
    try:
        for _ in range(5):  # on a loaded machine, faults of a minute may all hit starts
            soaked.run_for(60)
            soak.set_restart_times(soaked.faults, soaked.run.rows("events.jsonl"))
            if any(fault.training and fault.ready for fault in soaked.faults):
                break
        found = soak.build_result(soaked, compared_steps=50)
    finally:
        soaked.run.kill_all()
    assert found["ledger"]["is_closed"]
    assert found["steps_without_gaps_or_duplicates"]
    assert not found["checkpoints_lost_or_damaged"]
    assert not found["losses_differ"]
    assert not found["orphans"]
    assert not found["leftovers_at_end"]
