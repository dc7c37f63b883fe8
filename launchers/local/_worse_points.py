"""Sequential stopping: train no further seeds of points that are worse than their baseline."""

from collections.abc import Sequence

from hlat.config.config_errors import ConfigError
from hlat.config.seeds import is_seed_override
from hlat.study.run_comparison import load_run_records
from hlat.study.run_record import is_run_dir
from hlat.study.study_analysis import Verdict
from hlat.study.study_result import build_study_result

from ._core_budget import ResourceRequest
from ._process_pool import ProcessPool
from ._sweep_console import SweepConsole, SweepTask

Work = tuple[SweepTask, ResourceRequest]


def run_until_worse(
    pool: ProcessPool, work: Sequence[Work], console: SweepConsole
) -> tuple[dict[int, int], dict[int, str]]:
    """Run points seed by seed, in ascending order of the seeds; print the points that are omitted.

    Returns:
        The exit codes of the started points, and the reasons of the points that were not started
        because their settings are worse than the baseline, by number.
    """
    seeds = sorted({_get_seeds(task) for task, _ in work})
    codes: dict[int, int] = {}
    stopped: dict[int, str] = {}
    for seed in seeds:
        worse = _find_worse_settings([task for task, _ in work], len(seeds)) if codes else {}
        current = [item for item in work if _get_seeds(item[0]) == seed]
        for task, _ in current:
            if (reason := worse.get(_get_settings(task))) is not None:
                stopped[task.number] = reason
                console.omit(task, reason)
        codes = pool.run([item for item in current if item[0].number not in stopped])
    return codes, stopped


def _find_worse_settings(tasks: Sequence[SweepTask], num_seeds: int) -> dict[str, str]:
    """Return the settings, without the seed, that are worse than the baseline, with the reason."""
    directories = [task.point.run_dir for task in tasks if is_run_dir(task.point.run_dir)]
    try:
        result = build_study_result(load_run_records(directories), num_seeds)
    except ConfigError:  # no run has started
        return {}
    by_run = {task.point.run_dir.name: _get_settings(task) for task in tasks}
    reasons = {}
    for comparison in result.comparisons if result else ():
        if comparison.verdict is Verdict.worse:
            difference = comparison.difference
            reason = (
                f"{comparison.label}: worse by {abs(difference.mean):.4f} with "
                f"{difference.num_pairs} seeds, p={comparison.p_value:.2g}"
            )
            for name in result.points[comparison.point].run_names:
                reasons[by_run[name]] = reason
    return reasons


def _get_seeds(task: SweepTask) -> tuple[int, int, int]:
    run = task.point.config.run
    return run.seed, run.resolved_init_seed, run.resolved_data_seed


def _get_settings(task: SweepTask) -> str:
    """Return the overrides of a point without its seeds."""
    return " ".join(word for word in task.point.overrides if not is_seed_override(word))
