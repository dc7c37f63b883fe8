"""Folders of what was sent: numbered, found again, and read as they were written."""

from dataclasses import replace

import pytest

from hlat.config.errors import ConfigError
from hlat.jobs.submission import Place, Submission, make, newest, runs
from hlat.tracking import sweep

SENT = Submission(2, [["python", "x"]], True, {"A": "b c"}, ["--x=y"], 3, 1024)


def test_a_submission_comes_back(tmp_path):
    place = make(tmp_path / "run")
    place.save(SENT)
    assert place.load() == SENT
    assert place.run_folder == tmp_path / "run"
    assert (place.job, place.before) == (None, None)
    for job in ("3", "7"):
        place.receipts.append({"job": job, "time": 1.0})
    assert (place.job, place.script.name) == ("7", "3_submission.sh")


def test_what_must_come_before_is_found(tmp_path):
    before, place = make(tmp_path / "run"), make(tmp_path / "run")
    place.save(replace(SENT, after=before.folder.name))
    assert place.before == before


def test_each_has_a_folder_of_its_own_and_the_newest_is_found(tmp_path):
    places = [make(tmp_path) for _ in range(11)]
    assert [place.folder.name for place in places] == [str(i + 1) for i in range(11)]
    assert newest(tmp_path) is None
    for place in places[:10]:
        place.save(SENT)
    assert newest(tmp_path) == places[9]


def test_what_is_no_submission_is_told(tmp_path):
    with pytest.raises(ConfigError, match="holds no submission"):
        Place(tmp_path).load()
    (tmp_path / "job.json").write_text('{"nodes": 1, "shell": "rm"}')
    with pytest.raises(ConfigError, match="holds no submission"):
        Place(tmp_path).load()


def test_runs_are_found_by_run_by_root_and_by_sweep(tmp_path):
    for name in ("b", "a"):
        make(tmp_path / name).save(SENT)
    (tmp_path / "not_sent").mkdir()
    sweep.add(tmp_path / "sweep", 0, tmp_path / "b", ["run.name=b"], {"job": "7"})
    sweep.leave_out(tmp_path / "sweep", ["run.name=c"], ["no"])
    assert [*runs(tmp_path / "a")] == [tmp_path / "a"]
    assert [*runs(tmp_path)] == [tmp_path / "a", tmp_path / "b"]
    assert [*runs(tmp_path / "sweep")] == [tmp_path / "b"]
    evaluation = tmp_path / "a/evaluations/mmlu-1"
    make(evaluation).save(SENT)
    make(tmp_path / "not_sent/evaluations/mmlu-1").save(SENT)
    assert [*runs(tmp_path / "a")] == [tmp_path / "a"]
    assert [*runs(tmp_path / "a/evaluations")] == [evaluation]
    assert [*runs(evaluation)] == [evaluation]
    assert [*runs(tmp_path)] == [
        *(tmp_path / "a", evaluation, tmp_path / "b", tmp_path / "not_sent/evaluations/mmlu-1")
    ]
    with pytest.raises(ConfigError, match="is no folder"):
        [*runs(tmp_path / "nowhere")]
