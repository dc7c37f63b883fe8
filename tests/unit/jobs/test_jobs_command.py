"""`hlat jobs` with fake Slurm programs: states after Slurm has deleted its records, resubmission."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hlat.jobs import job_table
from hlat.jobs.__main__ import main
from hlat.jobs.job_array import JobArray, create_numbered_dir
from hlat.jobs.job_table import load_job_rows
from hlat.jobs.slurm_commands import JobState
from hlat.jobs.submission import (
    Submission,
    SubmissionDir,
    create_submission_dir,
    lock_submissions,
)

PROGRAM = """#!/bin/sh
echo "$(basename $0) $*" >> {log}
case $0 in *squeue) cat {queue};; *sbatch) echo 99;; esac
"""


class FakeSlurm:
    """Directory with runs, and fake programs of Slurm that log their arguments."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs, self.queue, self.log = (folder / name for name in ("runs", "queue", "log"))
        self.log.touch()
        self.queue.touch()
        (folder / "bin").mkdir()
        for name in ("squeue", "sbatch", "scancel"):
            path = folder / "bin" / name
            path.write_text(PROGRAM.format(log=self.log, queue=self.queue))
            path.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder / "bin"), prepend=os.pathsep)

    def submit(self, name: str, job: str, **fields: Any) -> SubmissionDir:
        directory = create_submission_dir(self.runs / name)
        directory.save(Submission(1, [["x"]], True, {}, [], 9, 1, **fields))
        directory.script_path.touch()
        directory.receipts.append({"job": job, "time": 1.0})
        return directory

    def submit_array(self, job: str, *names: str, after: str | None = None) -> list[SubmissionDir]:
        array = JobArray(create_numbered_dir(self.runs.parent / "sweep/arrays"))
        array.script_path.write_text("#SBATCH --array=0-9%2\n")
        directories = [create_submission_dir(self.runs / name) for name in names]
        for task, path in enumerate(directories):
            fields = {"array": str(array.path), "task": task, "after": after}
            path.save(Submission(1, [["x"]], True, {}, [], 9, 1, **fields))
        array.link_tasks(directories)
        array.log_receipt(job, range(len(names)))
        return directories

    def end(self, name: str, job: str, code: int, **fields: Any) -> None:
        attempts = self.submit(name, job).attempts
        attempts.append({"event": "start", "job": job, "attempt": 1, "nodes": "n1"})
        attempts.append({"event": "end", "job": job, "attempt": 1, "exit": code, **fields})

    def sent(self) -> list[str]:
        lines = [line.replace(str(self.runs), "") for line in self.log.read_text().splitlines()]
        return [line for line in lines if not line.startswith("squeue")]

    def states(self) -> dict[str, str]:
        rows = load_job_rows([*sorted(self.runs.iterdir())])
        return {row.submission_dir.run_dir.name: row.state for row in rows}


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> FakeSlurm:
    return FakeSlurm(tmp_path, monkeypatch)


def test_states_of_deleted_jobs(slurm):
    slurm.end("complete", "1", 0)
    slurm.end("diverged", "2", 3)
    slurm.end("stalled", "3", 75, cancelled=False)
    slurm.end("terminated", "4", 75, cancelled=True)
    slurm.submit("unknown", "5")
    killed = slurm.submit("killed", "6").attempts
    killed.append({"event": "start", "job": "6", "attempt": 1, "nodes": "n1"})
    slurm.submit("waiting", "7")
    slurm.queue.write_text("7|PENDING||Priority\n")
    assert main(["cancel", str(slurm.runs / "waiting")]) == 0
    assert slurm.sent() == ["scancel 7"]
    slurm.queue.write_text("")
    assert slurm.states() == {
        "complete": "COMPLETED",
        "diverged": "DIVERGED",
        "killed": "KILLED",
        "stalled": "INTERRUPTED",
        "terminated": "CANCELLED",
        "unknown": "LOST",
        "waiting": "CANCELLED",
    }


def test_failed_runs_are_submitted_with_their_dependency(slurm, capsys):
    slurm.end("diverged", "1", 3)
    slurm.end("failed", "2", 1)
    slurm.end("terminated", "3", 75, cancelled=True)
    assert main(["resubmit", str(slurm.runs), "failed=true"]) == 0
    assert slurm.sent() == ["sbatch --parsable /failed/submissions/1/submission.sh"]
    printed = capsys.readouterr().out
    assert "/diverged is DIVERGED; to submit it again: hlat jobs resubmit" in printed
    assert "/terminated is CANCELLED" in printed
    assert main(["resubmit", str(slurm.runs / "diverged")]) == 0
    assert slurm.sent()[1] == "sbatch --parsable /diverged/submissions/1/submission.sh"


def test_only_the_runs_to_submit_are_locked(slurm, capsys):
    slurm.end("complete", "1", 0)
    with lock_submissions([slurm.runs / "complete"]):
        assert main(["resubmit", str(slurm.runs), "failed=true"]) == 0
        assert "no run was submitted" in capsys.readouterr().out
        slurm.end("failed", "2", 1)
        assert main(["resubmit", str(slurm.runs), "failed=true"]) == 0
        assert main(["resubmit", str(slurm.runs / "complete")]) == 2
    assert slurm.sent() == ["sbatch --parsable /failed/submissions/1/submission.sh"]


def test_a_failed_compile_job_is_submitted_with_its_run(slurm):
    slurm.end("x", "1", 1)
    slurm.submit("x", "2", after="1")
    slurm.queue.write_text("2|CANCELLED||Dependency\n")
    assert main(["resubmit", str(slurm.runs), "failed=true"]) == 0
    assert slurm.sent() == [
        "sbatch --parsable /x/submissions/1/submission.sh",
        "sbatch --parsable --dependency=afterok:99 /x/submissions/2/submission.sh",
    ]


def test_a_complete_compile_job_is_no_dependency(slurm):
    slurm.end("x", "1", 0)
    run = slurm.submit("x", "2", after="1")
    run.attempts.append({"event": "end", "job": "2", "attempt": 1, "exit": 1})
    assert main(["resubmit", str(slurm.runs), "failed=true"]) == 0
    assert slurm.sent() == ["sbatch --parsable --dependency= /x/submissions/2/submission.sh"]


def test_failed_tasks_of_an_array_are_submitted_together(slurm, capsys):
    tasks = slurm.submit_array("5", "a", "b", "c", "d")
    for task, (path, code) in enumerate(zip(tasks, [1, 0, 3, 1], strict=True)):
        assert path.last_job_id == f"5_{task}"
        job = {"job": f"5_{task}", "attempt": 1}
        path.attempts.append({"event": "start", "nodes": "n1", **job})
        path.attempts.append({"event": "end", "exit": code, **job})
    slurm.queue.write_text("5_3|RUNNING|n1|None\n6_0|RUNNING|n1|None\n")
    assert slurm.states() == {"a": "FAILED", "b": "COMPLETED", "c": "DIVERGED", "d": "RUNNING"}
    slurm.queue.write_text("")
    assert main(["resubmit", str(slurm.runs), "failed=true"]) == 0
    script = f"{slurm.runs.parent}/sweep/arrays/1/submission.sh"
    assert slurm.sent() == [f"sbatch --parsable --array=0,3%2 {script}"]
    assert "job 99_3 trains" in capsys.readouterr().out
    assert [path.last_job_id for path in tasks] == ["99_0", "5_1", "5_2", "99_3"]
    slurm.queue.write_text("99_0|PENDING||Priority\n99_3|PENDING||Priority\n")
    assert main(["cancel", str(slurm.runs)]) == 0
    assert slurm.sent()[1:] == ["scancel 99_0 99_3"]


def test_tasks_are_submitted_after_the_tasks_that_compile(slurm):
    slurm.submit_array("5", "a", "b", "c")
    tasks = slurm.submit_array("6", "a", "b", "c", after="1")
    compiled = SubmissionDir(tasks[1].path.with_name("1"))
    compiled.attempts.append({"event": "end", "job": "5_1", "exit": 0, "attempt": 1})
    assert main(["resubmit", str(slurm.runs), "failed=true"]) == 0
    arrays = f"{slurm.runs.parent}/sweep/arrays"
    assert slurm.sent() == [
        f"sbatch --parsable --array=0,2%2 {arrays}/1/submission.sh",
        f"sbatch --parsable --dependency=aftercorr:99 --array=0,2%2 {arrays}/2/submission.sh",
        f"sbatch --parsable --dependency= --array=1%2 {arrays}/2/submission.sh",
    ]


def test_patterns_select_runs(slurm, monkeypatch, capsys):
    for name in ("a-1", "a-2", "b-1"):
        slurm.submit(name, name[0] + name[-1])
    slurm.queue.write_text("".join(f"{job}|RUNNING|n1|None\n" for job in ("a1", "a2", "b1")))
    assert main(["cancel", f"{slurm.runs}/a-*"]) == 0
    monkeypatch.chdir(slurm.runs.parent)
    assert main(["cancel", "?-1"]) == 0
    assert slurm.sent() == ["scancel a1 a2", "scancel a1 b1"]
    assert main(["logs", "c*"]) == 2
    assert "no submitted run in runs matches c*" in capsys.readouterr().err


@pytest.mark.slow  # 1,000 runs
def test_list_1000_jobs_with_one_request_in_two_seconds(slurm):
    names = [f"run-{number:04}" for number in range(1000)]
    rows = "".join(f'{{"step": {step}, "time": 1.0, "loss": 1.5}}\n' for step in range(2000))
    for task, path in enumerate(slurm.submit_array("5", *names)):
        (path.run_dir / "metrics.jsonl").write_text(rows)
        path.attempts.append(
            {"event": "start", "job": f"5_{task}", "attempt": 1, "nodes": "n1", "time": 1.0}
        )
    slurm.queue.write_text("".join(f"5_{task}|RUNNING|n1|None\n" for task in range(1000)))
    command = [sys.executable, "-m", "hlat.jobs", str(slurm.runs), "json=true"]
    before = os.times()
    done = subprocess.run(command, capture_output=True, text=True)
    after = os.times()
    seconds = after.children_user - before.children_user
    seconds += after.children_system - before.children_system
    assert [row["step"] for row in json.loads(done.stdout)] == [1999] * 1000
    assert slurm.log.read_text().count("squeue") == 1
    assert seconds < 2


def test_print_json(slurm, capsys):
    slurm.end("x", "1", 0)
    slurm.submit("x", "2", after="1")
    slurm.queue.write_text("2|RUNNING|n[1-2]|None\n")
    assert main([str(slurm.runs), "json=true"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["run"], row["job"]) == (str(slurm.runs / "x"), "2")
    assert (row["state"], row["nodes"], row["step"]) == ("RUNNING", "n[1-2]", None)
    assert row["prerequisite"]["state"] == "COMPLETED"


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (1, 1)])
def test_wait_until_all_jobs_have_ended(slurm, capsys, monkeypatch, code, expected):
    slurm.end("ended", "1", 0)
    slurm.end("waiting", "2", code)
    slurm.queue.write_text("2|PENDING||Priority\n")
    monkeypatch.setattr("time.sleep", lambda seconds: slurm.queue.write_text(""))
    assert main([str(slurm.runs), "wait=true"]) == expected
    assert "PENDING" not in capsys.readouterr().out


def test_settings_of_other_actions_are_rejected(slurm, capsys):
    with pytest.raises(SystemExit):
        main(["cancel", "json=true"])
    assert "json= is not a setting of cancel" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("slurm", "end", "state"),
    [
        ("TIMEOUT", {"exit": 0}, "COMPLETED"),
        ("NODE_FAIL", {"exit": 3}, "DIVERGED"),
        ("CANCELLED", {"exit": 75, "cancelled": True}, "CANCELLED"),
        ("TIMEOUT", {"exit": 75, "again": "it was stopped to save its state"}, "TIMEOUT"),
        ("TIMEOUT", None, "TIMEOUT"),
        ("COMPLETING", {"exit": 0}, "COMPLETING"),
        ("PENDING", {"exit": 75, "again": "unhealthy: n1"}, "PENDING"),
    ],
)
def test_the_recorded_end_of_a_job_precedes_the_state_of_slurm(slurm, end, state) -> None:
    """A controller that was down for the end of a job records a TIMEOUT."""
    attempts = [{"event": "start"}, *([{"event": "end"} | end] if end else [])]
    assert job_table._resolve_state(JobState(slurm, "n1", "None"), attempts) == state
