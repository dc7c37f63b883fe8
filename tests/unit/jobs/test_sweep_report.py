"""The job of a sweep that ends last writes the comparison."""

from pathlib import Path

import pytest

from hlat.jobs import attempt
from hlat.jobs.submission import Submission, SubmissionDir, create_submission_dir
from hlat.tracking import sweep_log


@pytest.fixture
def submissions(tmp_path) -> list[SubmissionDir]:
    """Return the submissions of a sweep of two points that have started."""
    found = []
    for number, name in enumerate("ab"):
        directory = create_submission_dir(tmp_path / name)
        directory.save(Submission(1, [["x"]], True, {}, [], 9, 1))
        directory.receipts.append({"job": name})
        directory.attempts.append({"event": "start", "job": name})
        sweep_log.log_point(tmp_path / "sweep", number, tmp_path / name, [name], {})
        found.append(directory)
    return found


def end(directory: SubmissionDir, code: int, again: str | None = None) -> None:
    job = directory.last_job_id
    directory.attempts.append({"event": "end", "job": job, "exit": code, "again": again})


def test_a_sweep_ends_with_its_last_job(submissions, tmp_path, monkeypatch):
    calls: list[list[str]] = []
    monkeypatch.setattr("subprocess.run", lambda command, **_: calls.append(command))
    sweep, (first, second) = tmp_path / "sweep", submissions

    def write() -> list[list[str]]:
        attempt.write_report_if_last(["python", "code.zip"], sweep)
        return calls

    end(first, 0)
    assert not write()
    end(second, 1, again="it failed at step 3")
    assert not write(), "it is restarted"
    second.attempts.append({"event": "start", "job": "b"})
    end(second, 1)
    assert write() == [["python", "code.zip", "hlat.report", str(sweep)]]
    second.receipts.append({"job": "c"})
    assert not attempt.has_ended(sweep), "it was submitted again"
    second.attempts.append({"event": "cancel", "job": "c"})
    assert attempt.has_ended(sweep)


def test_a_run_without_a_compiled_graph_has_ended(submissions, tmp_path):
    first, second = submissions
    end(first, 0)
    end(second, 1)
    run = create_submission_dir(tmp_path / "b")
    run.save(Submission(1, [["x"]], True, {}, [], 9, 1, after="1"))
    run.receipts.append({"job": "9"})
    assert attempt.has_ended(tmp_path / "sweep")
    assert not attempt.has_ended(Path(tmp_path))
