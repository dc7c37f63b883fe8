"""Directories of submissions: numbering, lookup, and job.json."""

import errno
import fcntl
import os
from dataclasses import replace

import pytest

from hlat.config.config_errors import ConfigError
from hlat.jobs.submission import (
    Submission,
    SubmissionDir,
    create_submission_dir,
    find_latest_submission,
    find_submitted_runs,
    lock_submissions,
)
from hlat.tracking import sweep_log

SUBMISSION = Submission(2, [["python", "x"]], True, {"A": "b c"}, ["--x=y"], 3, 1024)


def test_save_and_load(tmp_path):
    directory = create_submission_dir(tmp_path / "run")
    directory.save(SUBMISSION)
    assert directory.load() == SUBMISSION
    assert directory.run_dir == tmp_path / "run"
    assert (directory.last_job_id, directory.prerequisite) == (None, None)
    for job in ("3", "7"):
        directory.receipts.append({"job": job, "time": 1.0})
    assert (directory.last_job_id, directory.script_path.name) == ("7", "submission.sh")


def test_scripts_of_earlier_versions_are_found(tmp_path):
    directory = create_submission_dir(tmp_path / "run")
    for name in ("7_submission.sh", "3_submission.sh", "7.log"):
        (directory.path / name).touch()
    assert directory.script_path.name == "3_submission.sh"


def test_prerequisite(tmp_path):
    first, second = create_submission_dir(tmp_path / "run"), create_submission_dir(tmp_path / "run")
    second.save(replace(SUBMISSION, after=first.path.name))
    assert second.prerequisite == first


def test_directories_are_numbered(tmp_path):
    directories = [create_submission_dir(tmp_path) for _ in range(11)]
    assert [directory.path.name for directory in directories] == [str(i + 1) for i in range(11)]
    assert find_latest_submission(tmp_path) is None
    for directory in directories[:10]:
        directory.save(SUBMISSION)
    assert find_latest_submission(tmp_path) == directories[9]


def test_invalid_submission_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match="contains no valid submission"):
        SubmissionDir(tmp_path).load()
    (tmp_path / "job.json").write_text('{"nodes": 1, "shell": "rm"}')
    with pytest.raises(ConfigError, match="contains no valid submission"):
        SubmissionDir(tmp_path).load()


def test_find_submitted_runs(tmp_path):
    for name in ("b", "a"):
        create_submission_dir(tmp_path / name).save(SUBMISSION)
    (tmp_path / "not_submitted").mkdir()
    sweep_log.log_point(tmp_path / "sweep", 0, tmp_path / "b", ["run.name=b"], {"job": "7"})
    sweep_log.log_skipped_point(tmp_path / "sweep", ["run.name=c"], ["no"])
    assert [*find_submitted_runs(tmp_path / "a")] == [tmp_path / "a"]
    assert [*find_submitted_runs(tmp_path)] == [tmp_path / "a", tmp_path / "b"]
    assert [*find_submitted_runs(tmp_path / "sweep")] == [tmp_path / "b"]
    evaluation = tmp_path / "a/evaluations/mmlu-1"
    create_submission_dir(evaluation).save(SUBMISSION)
    create_submission_dir(tmp_path / "not_submitted/evaluations/mmlu-1").save(SUBMISSION)
    assert [*find_submitted_runs(tmp_path / "a")] == [tmp_path / "a"]
    assert [*find_submitted_runs(tmp_path / "a/evaluations")] == [evaluation]
    assert [*find_submitted_runs(evaluation)] == [evaluation]
    assert [*find_submitted_runs(tmp_path)] == [
        *(tmp_path / "a", evaluation, tmp_path / "b", tmp_path / "not_submitted/evaluations/mmlu-1")
    ]
    with pytest.raises(ConfigError, match="is no directory"):
        [*find_submitted_runs(tmp_path / "nowhere")]


def test_one_command_at_a_time_submits_a_run(tmp_path):
    first, second = tmp_path / "a/first", tmp_path / "a/second"
    with lock_submissions([second, first, first]):
        with (
            pytest.raises(ConfigError, match=r"a/second: another command submits its jobs; wait"),
            lock_submissions([tmp_path / "other", second]),
        ):
            pytest.fail("the lock is held")
        create_submission_dir(first)
    names = [path.name for path in sorted(tmp_path.rglob("*"))]
    assert names == ["a", "first", "submissions", ".lock", "1"], "second was removed"
    with lock_submissions([first, second]):
        assert find_latest_submission(second) is None


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.raises(ConfigError, match=r"a: its file system cannot lock files \(No locks"),
        lock_submissions([tmp_path / "a"]),
    ):
        pytest.fail("nothing is locked")
