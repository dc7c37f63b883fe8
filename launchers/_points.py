"""Looks at every point of a sweep before the first one starts.

A mistake in the last point should not be found hours after the first has begun, and two points in
one run folder would silently be one.
"""

import copy
import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from hlat.config.entry import config_dir_flags
from hlat.config.errors import ConfigError
from hlat.config.explain import explain
from hlat.config.resolve import resolve
from hlat.config.run import Config
from hlat.planning import step_time
from hlat.planning.feasibility import refuse_infeasible
from hlat.tracking import sweep

_GROUP = "WANDB_RUN_GROUP"
"""Of W&B's library (its documentation of environment variables)."""


@dataclass
class Pruning:
    """What becomes of points that cannot run."""

    prune: bool = False
    """Leave out points that cannot run, and list them, in place of refusing the whole sweep; where
    the planner knows the hardware, the fastest of the others come first."""


@dataclass(frozen=True)
class Point:
    """One point of a sweep, which can run.

    Attributes:
        overrides: What makes it this one.
        composed: The configuration, with the run named.
        config: The same, resolved.
        section: Hydra's own section of it.
    """

    overrides: Sequence[str]
    composed: DictConfig
    config: Config
    section: DictConfig

    @property
    def planned_tokens_per_second(self) -> float | None:
        """What the planner expects; None where it does not know the hardware."""
        try:
            seconds = step_time.predict(self.config).total
        except ConfigError:
            return None
        return self.config.batch.tokens_per_step / seconds

    @property
    def folder(self) -> Path:
        """The run's."""
        assert self.config.run.name is not None, "resolve names every run"
        return Path(self.config.run.root) / self.config.run.name


def check(
    context: HydraContext, config: DictConfig, points: Sequence[Sequence[str]], prune: bool
) -> list[Point]:
    """Return the points if every one can run, each in a folder of its own.

    Args:
        context: Hydra's.
        config: What is swept.
        points: Overrides of each.
        prune: Whether those that cannot run are left out, as long as one can, and the others come
            in the order of their planned speed.

    Raises:
        ConfigError: All problems of all points, with the point's overrides in front.
    """
    problems: list[tuple[Sequence[str], Sequence[str]]] = []
    found: dict[Path, Point] = {}
    for overrides in points:
        try:
            point = _point(context, config, overrides)
        except ConfigError as error:
            problems.append((overrides, error.problems))
            continue
        if (owner := found.setdefault(point.folder, point)) is not point:
            told = (
                f"would train in {point.folder}, as [{' '.join(owner.overrides)}] does; leave "
                "run.name out, or give each point its own"
            )
            problems.append((overrides, [told]))
    lines = [f"[{' '.join(overrides)}] {line}" for overrides, told in problems for line in told]
    if lines and not (prune and found):
        raise ConfigError(*lines)
    for line in lines:
        print(f"left out: {line}")
    for overrides, told in problems:
        sweep.leave_out(Path(config.hydra.sweep.dir), overrides, told)
    return sorted(found.values(), key=_slowness) if prune else [*found.values()]


def flags(config: DictConfig) -> list[str]:
    """What the user typed for Hydra itself, which is the same for every point."""
    typed: Any = OmegaConf.to_container(config.hydra.overrides.hydra, resolve=False)
    kept = [word for word in typed if not word.startswith("hydra.mode=")]
    return [*config_dir_flags(config.hydra), *kept]


def grouped(sweep_folder: Path, points: Sequence[Point]) -> dict[str, str]:
    """The variable by which W&B groups a sweep's runs where no configuration does.

    A single run that was sent is none, and what the user has set stays.
    """
    if len(points) == 1 or _GROUP in os.environ:
        return {}
    return {_GROUP: sweep_folder.name}


def entry(task: TaskFunction) -> str:
    """The entry that is swept: the task's file, as Hydra names a job that nobody names."""
    return Path(inspect.unwrap(task).__code__.co_filename).stem


def record(
    folder: Path, number: int, point: Point, run_folder: Path, job: str | None = None
) -> None:
    """Write down a point in the sweep's folder, with the number that a scheduler gave its job."""
    planned = point.planned_tokens_per_second
    known = {"job": job, "planned_tokens_per_second": planned}
    told = {key: value for key, value in known.items() if value is not None}
    sweep.add(folder, number, run_folder, point.overrides, told)


def returned(point: Point, number: int, job: str, receipt: Any = None) -> JobReturn:
    """What Hydra is told of a point that has run, or was sent.

    Args:
        point: It.
        number: Its number in the sweep.
        job: What the scheduler calls it.
        receipt: How to find it.
    """
    section = copy.deepcopy(point.section)
    with open_dict(section):
        section.job.num, section.job.id = number, job
    done = JobReturn(
        overrides=list(point.overrides),
        cfg=point.composed,
        hydra_cfg=OmegaConf.create({"hydra": section}),
        working_dir=str(point.folder),
        task_name=section.job.name,
        status=JobStatus.COMPLETED,
    )
    done.return_value = receipt
    return done


def _slowness(point: Point) -> float:
    return -(point.planned_tokens_per_second or 0.0)


def _point(context: HydraContext, config: DictConfig, overrides: Sequence[str]) -> Point:
    try:
        composed = context.config_loader.load_sweep_config(config, list(overrides))
        with open_dict(composed):
            section = composed.pop("hydra")
        composed = OmegaConf.create(composed)
        resolved = resolve(composed)
    except OmegaConfBaseException as error:
        raise explain(error) from error
    refuse_infeasible(resolved)
    composed.run.name = resolved.run.name
    return Point(overrides, composed, resolved, section)
