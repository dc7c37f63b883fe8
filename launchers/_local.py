"""Runs the points of a sweep on this machine, each in a process of its own, some of them at once.

A process per point keeps the points independent: one that diverges ends alone, and no state of the
machinery leaks from one into the next (docs/adr/0030-points-share-a-machine.md).
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from hlat.config.errors import ConfigError, Exit

from ._budget import ALONE, WHOLE, Budget, Need, budget, need, problems, takes_accelerators
from ._console import Console, Task
from ._points import Point, Pruning, check, entry, flags, grouped, record, returned
from ._queue import Queue


@dataclass
class LocalLauncherConfig(Pruning):
    """How much of this machine the points of a sweep share."""

    _target_: str = "hydra_plugins.hlat_launchers._local.LocalLauncher"
    jobs: int = 1
    """Points at once, at most; fewer where the budget has no room. 1: each has the machine and the
    console to itself, as a single run has."""
    cores: int | None = None
    """Cores that points at once may use together; null: those that this process may use."""
    memory_gib: float | None = None
    """Main memory that they may use together, by the planner's estimate; null: the machine's."""


ConfigStore.instance().store(
    group="hydra/launcher", name="local", node=LocalLauncherConfig, provider="hlat"
)


class LocalLauncher(Launcher):
    """Hydra launcher that starts `python -m hlat.<entry> <overrides>` for every point."""

    def __init__(self, **settings: Any) -> None:
        self.settings: LocalLauncherConfig = OmegaConf.to_object(  # type: ignore[assignment]
            OmegaConf.merge(OmegaConf.structured(LocalLauncherConfig), settings)
        )

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Remember what is swept.

        Raises:
            ConfigError: The settings cannot mean what they say.
        """
        refuse_settings(self.settings, entry(task_function))
        self.context, self.config = hydra_context, config
        self.command = [sys.executable, "-m", f"hlat.{entry(task_function)}", *flags(config)]

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Check all points, run them, and exit with the first failure's code.

        A point that fails does not stop the ones after it; one that was interrupted does.

        Raises:
            ConfigError: A point cannot run, or not with what there is. None has started then.
        """
        points = check(self.context, self.config, job_overrides, self.settings.prune)
        shared, needs = shares(points, self.settings)
        tasks = [
            Task(number, point, self._log(number))
            for number, point in enumerate(points, initial_job_idx)
        ]
        for task in tasks:
            record(self._folder, task.number, task.point, task.point.folder)
        queue = Queue(self.command, grouped(self._folder, points), shared, Console())
        codes = queue.run([*zip(tasks, needs, strict=True)])
        if told := _shortfall(codes, len(tasks)):
            print(f"hlat: of {len(tasks)} points {told}", file=sys.stderr)
            sys.exit(next((codes[i] for i in sorted(codes) if codes[i]), Exit.PREEMPTED))
        return [returned(task.point, task.number, str(task.number)) for task in tasks]

    def _log(self, number: int) -> Path | None:
        """Where a point's output goes: with others at once it would be a mess on the console."""
        return self._folder / f"{number}.log" if self.settings.jobs > 1 else None

    @property
    def _folder(self) -> Path:
        """The sweep's."""
        return Path(self.config.hydra.sweep.dir)


def refuse_settings(settings: LocalLauncherConfig, entry: str) -> None:
    """Return if the settings can mean what they say.

    Raises:
        ConfigError: They cannot.
    """
    found = []
    for key in ("jobs", "cores", "memory_gib"):
        value = getattr(settings, key)
        if value is not None and value <= 0:
            found.append(f"hydra.launcher.{key}={value} is too small; use 1 or more")
        elif value is not None and key != "jobs" and settings.jobs == 1:
            found.append(
                f"hydra.launcher.{key}={value} is for points at once, and hydra.launcher.jobs=1; "
                "set jobs too"
            )
    if settings.jobs > 1 and entry != "train":
        found.append(
            f"hydra.launcher.jobs={settings.jobs} is for hlat.train; hlat.{entry} has the machine "
            "to itself"
        )
    if found:
        raise ConfigError(*found)


def shares(points: Sequence[Point], settings: LocalLauncherConfig) -> tuple[Budget, list[Need]]:
    """Return what points share, and what each of them takes.

    Raises:
        ConfigError: A point takes more than there is.
    """
    if settings.jobs == 1:
        return ALONE, [WHOLE for _ in points]
    accelerators = any(takes_accelerators(point.config) for point in points)
    there_is = budget(settings.jobs, settings.cores, settings.memory_gib, accelerators)
    needs = [need(point.config, there_is) for point in points]
    found = [
        f"[{' '.join(point.overrides)}] {problem}"
        for point, takes in zip(points, needs, strict=True)
        for problem in problems(point.config, takes, there_is)
    ]
    if found:
        raise ConfigError(*found)
    return there_is, needs


def _shortfall(codes: dict[int, int], wanted: int) -> str:
    """How many points did not finish, and why; nothing if all did."""
    interrupted = sum(code == Exit.PREEMPTED for code in codes.values())
    failed = sum(code != 0 for code in codes.values()) - interrupted
    counts = {
        "failed": failed,
        "were interrupted": interrupted,
        "were not started": wanted - len(codes),
    }
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)
