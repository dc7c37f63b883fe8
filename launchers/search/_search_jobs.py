"""Trials of a search as Slurm jobs, of which ASHA stops those with bad intermediate results.

The process of the search must run until the end: it reads the files of the runs, and submits a
trial as soon as another one has ended. Jobs continue without it, and the same command continues
with them (docs/adr/0034-a-search-reads-run-folders.md).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hlat.config.config_errors import ConfigError
from hlat.jobs.job_table import JobRow, cancel_job_rows, load_job_rows
from hlat.tracking import sweep_log
from hlat.tracking.heldout_rows import get_loop_row
from hlat.tracking.jsonl_log import open_events_log
from hlat.tracking.row_validation import Row, get_mean

from ..slurm._slurm_launcher import SlurmLauncher

if TYPE_CHECKING:
    from optuna import Study

STOPPED_ATTRIBUTE = "stopped_at_step"
"""User attribute of a trial that ASHA has stopped."""
Points = Mapping[int, Sequence[str]]
"""Overrides of trials by number."""


class SearchJobs:
    """Jobs of the unfinished trials of a study.

    Args:
        launcher: Launcher that submits the trials.
        study: Study; its pruner decides which trials are stopped.
        sweep_dir: Directory of the search.
        report: Function that reports a trial that has finished or diverged to the study.
    """

    def __init__(
        self,
        launcher: SlurmLauncher,
        study: "Study",
        sweep_dir: Path,
        report: Callable[["Study", int, Path | None], None],
    ) -> None:
        self._launcher, self._study, self._sweep_dir = launcher, study, sweep_dir
        self._report = report

    def submit(self, points: Points) -> None:
        """Submit the trials without a job that is active or complete; identical ones once."""
        run_dirs = {number: self._find_run_dir(point) for number, point in points.items()}
        known = [path for path in run_dirs.values() if path is not None]
        rows = {row.submission_dir.run_dir: row for row in load_job_rows(known)}
        missing = {
            number: point
            for number, point in points.items()
            if (row := rows.get(run_dirs[number] or Path())) is None or row.has_failed
        }
        if missing:
            unique = [*dict.fromkeys(map(tuple, missing.values()))]
            self._launcher.launch(unique, initial_job_idx=min(missing))

    def update(self, points: Points) -> None:
        """Read the results of submitted trials, and stop those that the pruner rejects.

        Raises:
            ConfigError: The job of a trial has failed or was cancelled.
        """
        run_dirs = {number: self._find_run_dir(point) for number, point in points.items()}
        rows = load_job_rows([path for path in run_dirs.values() if path is not None], retry=True)
        by_dir = {row.submission_dir.run_dir: row for row in rows}
        for number, run_dir in run_dirs.items():
            assert run_dir is not None, "submitted before"
            row = by_dir[run_dir]
            must_stop = self._must_stop(number, run_dir)  # of finished trials, adds the values
            self._report(self._study, number, run_dir)
            trial = self._study.get_trials(deepcopy=False)[number]
            if trial.state.is_finished():
                continue
            if not row.is_active:
                raise ConfigError(
                    f"trial {number} [{' '.join(points[number])}] is {row.state}; repeat the "
                    f"command to submit it again, or read hlat jobs logs {run_dir}"
                )
            if must_stop:
                self._stop(number, row)

    def _find_run_dir(self, point: Sequence[str]) -> Path | None:
        return sweep_log.find_run_dir(self._sweep_dir, point)

    def _must_stop(self, number: int, run_dir: Path) -> bool:
        """Report new intermediate values of a trial; return True if the pruner rejects one."""
        import optuna

        frozen = self._study.get_trials(deepcopy=False)[number]
        trial = optuna.Trial(self._study, frozen._trial_id)
        for step, value in read_intermediate_values(run_dir):
            if step not in frozen.intermediate_values:
                trial.report(value, step)
                if trial.should_prune():
                    return True
        return False

    def _stop(self, number: int, row: JobRow) -> None:
        import optuna
        from optuna.trial import TrialState

        cancel_job_rows([row])
        trial = self._study.get_trials(deepcopy=False)[number]
        step, value = max(trial.intermediate_values.items())
        optuna.Trial(self._study, trial._trial_id).set_user_attr(STOPPED_ATTRIBUTE, step)
        self._study.tell(number, state=TrialState.PRUNED)
        print(f"search: trial {number} stopped at step {step}: {value:.4f} bits per byte")


def run_search_jobs(
    jobs: SearchJobs,
    find_unfinished: Callable[[], Points],
    sample: Callable[[], None],
    poll_s: float,
) -> None:
    """Run trials until `sample` adds none and all have ended."""
    submitted: set[int] = set()
    while True:
        sample()
        points = find_unfinished()
        if not points:
            return
        if points.keys() - submitted:
            jobs.submit({number: points[number] for number in points.keys() - submitted})
            submitted |= points.keys()
        time.sleep(poll_s)
        jobs.update(points)


def read_intermediate_values(run_dir: Path) -> list[tuple[int, float]]:
    """Return step and held-out bits per byte of each evaluation, on the same text."""
    events: list[Row] = open_events_log(run_dir).read_rows()
    return [
        (int(row["step"]), mean)
        for row in events
        if row["event"] == "evaluate"
        if (mean := get_mean(get_loop_row(row), "bits_per_byte")) is not None
    ]
