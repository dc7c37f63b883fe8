"""Submission of prepared tasks whose array sbatch rejects, or answers without a job id."""

import os
from typing import Any
from unittest import mock

import pytest

from hlat.config.compose import import_launcher_module
from hlat.config.config_errors import ConfigError
from hlat.jobs.job_array import JobArray, create_numbered_dir
from hlat.jobs.submission import Submission, SubmissionDir, create_submission_dir

SBATCH = """#!/bin/sh
echo "$*" >> {log}
case "$*" in {rejected}) echo sbatch: error: job limit >&2; exit 1;; esac
echo {answer}
"""


def _submit(tmp_path, monkeypatch, rejected: str, answer: str) -> list[SubmissionDir]:
    """Submit an array of three tasks with a fake sbatch; return their directories."""
    module: Any = import_launcher_module("slurm._prepared_job")
    (tmp_path / "sbatch").write_text(
        SBATCH.format(log=tmp_path / "log", rejected=rejected, answer=answer)
    )
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    array = JobArray(create_numbered_dir(tmp_path / "arrays"))
    array.script_path.write_text("#SBATCH --array=0-2%5\n")
    directories = [create_submission_dir(tmp_path / name) for name in "abc"]
    for task, path in enumerate(directories):
        path.save(Submission(1, [["x"]], True, {}, [], 9, 1, array=str(array.path), task=task))
    module.submit_tasks([mock.Mock(submission_dir=path) for path in directories])
    return directories


def _read_arrays(tmp_path) -> list[str]:
    return [line.split()[1] for line in (tmp_path / "log").read_text().splitlines()]


def test_submit_once_without_a_job_id(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"in place of a job id; .* before you submit it again"):
        _submit(tmp_path, monkeypatch, "nothing", "queued")
    assert _read_arrays(tmp_path) == ["--array=0-2%5"]


def test_submit_the_halves_of_a_rejected_array(tmp_path, monkeypatch):
    directories = _submit(tmp_path, monkeypatch, "*=0-2%*", "41")
    assert _read_arrays(tmp_path) == ["--array=0-2%5", "--array=0-1%5", "--array=2%5"]
    assert [path.last_job_id for path in directories] == ["41_0", "41_1", "41_2"]
