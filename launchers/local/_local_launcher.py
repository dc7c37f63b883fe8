"""Launcher that runs the points of a sweep on this machine, one process each.

Points in separate processes are independent (docs/adr/0030-points-share-a-machine.md).
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from hlat.config.bounds import find_bounds_violations
from hlat.config.config_errors import ConfigError, ExitCode
from hlat.config.entry_point import get_user_environment
from hlat.tracking import sweep_log

from .._sweep_points import (
    SweepPoint,
    build_group_environment,
    build_job_return,
    find_shared_overrides,
    format_swept,
    get_entry_point,
    get_hydra_flags,
    record_point,
    validate_points,
)
from ._core_budget import (
    ResourceBudget,
    ResourceRequest,
    build_budget,
    compute_request,
    find_budget_violations,
    uses_accelerators,
)
from ._local_settings import LocalLauncherConfig
from ._prepared_points import start_prepared_process
from ._process_pool import ProcessPool
from ._sweep_console import SweepConsole, SweepTask


class LocalLauncher(Launcher):
    """Hydra launcher that starts `python -m hlat.<entry point> <overrides>` for every point."""

    validates_points = True
    """All points are composed before the first one starts (`config_loader.py`)."""

    def __init__(self, **settings: Any) -> None:
        self.settings: LocalLauncherConfig = OmegaConf.to_object(  # type: ignore[assignment]
            OmegaConf.merge(OmegaConf.structured(LocalLauncherConfig), settings)
        )

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Store the context of the sweep.

        Raises:
            ConfigError: The settings are invalid.
        """
        self.entry_point = entry_point = get_entry_point(task_function)
        validate_local_settings(self.settings, entry_point)
        self.context, self.config = hydra_context, config
        self.command = [sys.executable, "-m", f"hlat.{entry_point}", *get_hydra_flags(config)]
        self.num_points = 0  # of a search, which launches its points in parts

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Validate and run all points, print their comparison, and exit with the first failure.

        After a failed point the sweep continues; after an interrupted point it stops.

        Raises:
            ConfigError: A point is invalid, or exceeds the budget. No point is started then.
        """
        points = validate_points(self.context, self.config, job_overrides, self.settings.prune)
        budget, requests = compute_requests(points, self.settings)
        sweep_dir = Path(self.config.hydra.sweep.dir)
        num_points = max(self.num_points, initial_job_idx + len(points))
        writes_logs = num_points > 1 and self.entry_point == "train"
        _print_undecidable(points)
        tasks = []
        for number, point in enumerate(points, initial_job_idx):
            log = sweep_dir / f"{number}.log" if writes_logs else None
            tasks.append(SweepTask(number, point, log))
            record_point(sweep_dir, number, point, point.run_dir)
        environment = build_group_environment(sweep_dir, points)
        console = SweepConsole(tasks, num_points)
        forks = False
        if writes_logs:
            environment[sweep_log.SWEEP_POINT_VARIABLE] = "1"
            single = next((r for r in requests if r.num_processes == 1), requests[0])
            variables = budget.build_environment(single, ())
            forks = start_prepared_process(points, self.command[3:], variables)
        pool = ProcessPool(self.command, environment, budget, console, forks)
        work = [*zip(tasks, requests, strict=True)]
        if points[0].config.study.stop_worse:
            from ._worse_points import run_until_worse  # reads reports, which are slow to import

            codes, stopped = run_until_worse(pool, work, console)
            for task in tasks:
                if task.number in stopped:
                    reason = stopped[task.number]
                    sweep_log.log_stopped_point(sweep_dir, task.point.overrides, reason)
        else:
            codes, stopped = pool.run(work), {}
        if len(codes) + len(stopped) == len(tasks) and ExitCode.PREEMPTED not in codes.values():
            self._print_comparison(points, sweep_dir)
        if unfinished := _format_unfinished(codes, len(tasks) - len(stopped)):
            print(f"hlat: of {len(tasks)} points {unfinished}", file=sys.stderr)
            sys.exit(next((codes[i] for i in sorted(codes) if codes[i]), ExitCode.PREEMPTED))
        return [build_job_return(task.point, task.number, str(task.number)) for task in tasks]

    def _print_comparison(self, points: Sequence[SweepPoint], sweep_dir: Path) -> None:
        """Print the comparison of the runs, with the tables of a study, and write its page."""
        if len(points) > 1 and self.entry_point == "train":
            print(flush=True)
            command = [sys.executable, "-m", "hlat", "report", str(sweep_dir)]
            subprocess.run(command, env=get_user_environment(), check=False)


def _print_undecidable(points: Sequence[SweepPoint]) -> None:
    """Print what the seeds of a study cannot decide, before it runs."""
    configs = [point.config for point in points]
    if configs[0].study.smallest_difference is None:
        return
    from hlat.plan.study_power import format_undecidable  # imports SciPy

    values = [dict(word.split("=", 1) for word in point.overrides) for point in points]
    if sentence := format_undecidable(values, configs):
        print(f"hlat: {sentence}", file=sys.stderr)


def validate_local_settings(settings: LocalLauncherConfig, entry_point: str) -> None:
    """Raise ConfigError if the settings are invalid."""
    problems = [*find_bounds_violations(settings, "hydra.launcher.")]
    for key in ("cores", "memory_gib"):
        value = getattr(settings, key)
        if value is not None and settings.jobs == 1:
            problems.append(
                f"hydra.launcher.{key}={value} applies to concurrent runs, and "
                "hydra.launcher.jobs=1; set jobs too"
            )
    if settings.jobs > 1 and entry_point != "train":
        problems.append(
            f"hydra.launcher.jobs={settings.jobs} is for hlat.train; hlat.{entry_point} uses the "
            "whole machine"
        )
    if problems:
        raise ConfigError(*problems)


def compute_requests(
    points: Sequence[SweepPoint], settings: LocalLauncherConfig
) -> tuple[ResourceBudget, list[ResourceRequest]]:
    """Return the budget of the sweep and the request of each point.

    Raises:
        ConfigError: A point exceeds the budget.
    """
    if settings.jobs == 1:
        return ResourceBudget(), [ResourceRequest() for _ in points]
    accelerators = any(uses_accelerators(point.config) for point in points)
    budget = build_budget(settings.jobs, settings.cores, settings.memory_gib, accelerators)
    requests = [compute_request(point.config, budget) for point in points]
    shared = find_shared_overrides([point.overrides for point in points])
    problems = [
        f"[{format_swept(point.overrides, shared)}] {problem}"
        for point, request in zip(points, requests, strict=True)
        for problem in find_budget_violations(point.config, request, budget)
    ]
    if problems:
        raise ConfigError(*problems)
    return budget, requests


def _format_unfinished(exit_codes: dict[int, int], num_tasks: int) -> str:
    """Return the numbers of unfinished points by reason; empty if all points finished."""
    interrupted = sum(code == ExitCode.PREEMPTED for code in exit_codes.values())
    counts = {
        "failed": sum(code != 0 for code in exit_codes.values()) - interrupted,
        "were interrupted": interrupted,
        "were not started": num_tasks - len(exit_codes),
    }
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count)
