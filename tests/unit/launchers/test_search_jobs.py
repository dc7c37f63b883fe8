"""ASHA stops jobs of trials that are worse than others, and starts new ones in their place.

Each wait of the search adds an evaluation to every running trial.
"""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from hlat.config import compose as composition
from hlat.config.config_errors import ConfigError
from hlat.tracking import sweep_log

composition.register_configs()
from hydra_plugins.hlat_launchers.search import _search_jobs as search_jobs  # noqa: E402 (known from now)
from hydra_plugins.hlat_launchers.search import _search_sweeper as sweeper  # noqa: E402 (as above)

NUM_EVALUATIONS = 8


class FakeJobs:
    """Launcher, scheduler and runs: a trial with value x has x + 1/n bits after n evaluations."""

    def __init__(self, folder: Path, num_parallel: int) -> None:
        self.folder, self.num_parallel = folder, num_parallel
        self.running: dict[Path, float] = {}
        self.launched: list[float] = []
        self.cancelled: list[Path] = []

    def launch(self, points, initial_job_idx):
        for number, point in enumerate(points, initial_job_idx):
            run_dir = self.folder / f"run-{len(self.launched)}"
            run_dir.mkdir()
            sweep_log.log_point(self.folder, number, run_dir, point, {})
            self.running[run_dir] = float(point[0].partition("=")[2])
            self.launched.append(self.running[run_dir])
        assert len(self.running) <= self.num_parallel

    def load_job_rows(self, run_dirs, retry=False):
        return [
            SimpleNamespace(
                submission_dir=SimpleNamespace(run_dir=run_dir),
                is_active=run_dir in self.running,
                has_failed=run_dir in self.cancelled,
                state="RUNNING",
            )
            for run_dir in run_dirs
        ]

    def cancel_job_rows(self, rows):
        for row in rows:
            del self.running[row.submission_dir.run_dir]
            self.cancelled.append(row.submission_dir.run_dir)

    def wait(self, seconds):
        for run_dir, value in [*self.running.items()]:
            with (run_dir / "events.jsonl").open("a+") as file:
                file.seek(0)
                step = len(file.readlines()) + 1
                bits = {"mean": value + 1 / step}
                row = {"event": "evaluate", "step": 10 * step, "time": 0.0, "bits_per_byte": bits}
                file.write(json.dumps(row) + "\n")
                if step == NUM_EVALUATIONS:
                    file.write('{"event": "finish", "step": 80, "time": 0.0}\n')
                    del self.running[run_dir]


@pytest.fixture
def jobs(tmp_path, monkeypatch) -> FakeJobs:
    found = FakeJobs(tmp_path, 4)
    monkeypatch.setattr(search_jobs, "load_job_rows", found.load_job_rows)
    monkeypatch.setattr(search_jobs, "cancel_job_rows", found.cancel_job_rows)
    # Other threads of the process also call time.sleep
    monkeypatch.setattr(search_jobs, "time", SimpleNamespace(sleep=found.wait))
    return found


def run(jobs: FakeJobs, min_steps: int):
    made = sweeper.SearchSweeper({}, 16, 1, asha_min_steps=min_steps, asha_reduction_factor=2)
    made.num_parallel_trials = jobs.num_parallel
    study = sweeper.open_study(jobs.folder, ["x"])
    study.pruner = made._build_pruner()
    (override,) = OverridesParser.create().parse_overrides(["x=interval(0.0,1.0)"])
    sample = partial(made._sample, study, {"x": sweeper.build_distribution(override)})
    find = partial(sweeper._find_points, study, [])
    trials = search_jobs.SearchJobs(jobs, study, jobs.folder, sweeper._report_trial)
    search_jobs.run_search_jobs(trials, find, sample, poll_s=1)
    return study


def test_worse_trials_are_stopped_and_replaced(jobs, capsys):
    study = run(jobs, min_steps=10)
    assert len(jobs.launched) == 16
    assert len(jobs.cancelled) >= 4
    states = [trial.state.name for trial in study.get_trials()]
    assert states.count("PRUNED") == len(jobs.cancelled)
    assert states.count("COMPLETE") == 16 - len(jobs.cancelled)
    assert study.best_trial.params["x"] == min(jobs.launched)
    sweeper._print_best_trial(study)
    printed = capsys.readouterr().out
    assert printed.count(" stopped at step ") == len(jobs.cancelled)
    assert f"{len(jobs.cancelled)} stopped by ASHA, 0 diverged" in printed


def test_trials_that_finish_between_two_polls_are_compared_with_others(jobs, monkeypatch):
    def finish(seconds):
        for _ in range(NUM_EVALUATIONS):
            jobs.wait(seconds)

    monkeypatch.setattr(search_jobs, "time", SimpleNamespace(sleep=finish))
    study = run(jobs, min_steps=10)
    trials = study.get_trials()
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 16
    assert all(trial.intermediate_values for trial in trials)


def test_without_asha_all_trials_finish(jobs):
    study = run(jobs, min_steps=0)
    assert not jobs.cancelled
    assert [trial.state.name for trial in study.get_trials()] == ["COMPLETE"] * 16


def test_a_second_search_continues_with_the_jobs_of_the_first(jobs, monkeypatch):
    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(search_jobs, "time", SimpleNamespace(sleep=interrupt))
    with pytest.raises(KeyboardInterrupt):
        run(jobs, min_steps=0)
    assert len(jobs.launched) == len(jobs.running) == 4
    monkeypatch.setattr(search_jobs, "time", SimpleNamespace(sleep=jobs.wait))
    study = run(jobs, min_steps=0)
    assert len(jobs.launched) == len(study.get_trials()) == 16


def test_a_failed_job_ends_the_search(jobs, monkeypatch):
    monkeypatch.setattr(
        search_jobs, "time", SimpleNamespace(sleep=lambda seconds: jobs.running.clear())
    )
    with pytest.raises(ConfigError, match="repeat the command to submit it again"):
        run(jobs, min_steps=0)
