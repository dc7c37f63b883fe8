"""Composition and validation of all points of a sweep before the first one starts."""

import inspect
import os
import zlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hlat.config.config_errors import ConfigError
from hlat.config.entry_point import build_config_dir_flags, find_missing_axes
from hlat.config.frozen_config import CommandLine, format_config, save_frozen_yaml
from hlat.config.hydra_errors import convert_hydra_error
from hlat.config.resolve import resolve_config
from hlat.config.run import Config
from hlat.plan import step_time
from hlat.plan.feasibility import validate_feasibility
from hlat.tracking import sweep_log

from ._point_composer import PointComposer, PointReturn

_WANDB_GROUP_VARIABLE = "WANDB_RUN_GROUP"
"""Environment variable of W&B (its documentation)."""


@dataclass(frozen=True)
class SweepPoint:
    """A valid point of a sweep.

    Attributes:
        config: Resolved configuration, which shares equal sections with other points.
        compressed_yaml: Compressed text of the composed configuration.
    """

    overrides: Sequence[str]
    config: Config
    compressed_yaml: bytes
    composer: PointComposer

    @property
    def yaml(self) -> str:
        """Composed configuration as in `frozen_config.format_config`."""
        return zlib.decompress(self.compressed_yaml).decode()

    def save_configuration(self, directory: Path, command_line: CommandLine) -> None:
        """Write the composed configuration for a job (`frozen_config.load_frozen_config`)."""
        save_frozen_yaml(directory, self.yaml, self.config.extensions, command_line)

    @property
    def planned_tokens_per_second(self) -> float | None:
        """Predicted throughput; None if the planner does not know the hardware."""
        try:
            seconds = step_time.predict_step_time(self.config).total
        except ConfigError:
            return None
        return self.config.batch.tokens_per_step / seconds

    @property
    def run_dir(self) -> Path:
        """Directory of the run."""
        assert self.config.run.name is not None, "resolve_config sets the name"
        return Path(self.config.run.root) / self.config.run.name


def validate_points(
    context: HydraContext, config: DictConfig, job_overrides: Sequence[Sequence[str]], prune: bool
) -> list[SweepPoint]:
    """Return the composed points, each with a separate run directory.

    With `prune`, skip invalid points if there is a valid one, and sort the others by predicted
    speed.

    Raises:
        ConfigError: All problems of all points, after the point's overrides.
        HydraException: The configuration of a point cannot be composed.
    """
    problems: list[tuple[Sequence[str], Sequence[str]]] = []
    points: dict[Path, SweepPoint] = {}
    composer, sections = PointComposer(context, config), dict[str, Any]()
    for overrides in job_overrides:
        composition = composer.compose(overrides)
        try:
            point = _validate_point(composer, overrides, composition, sections)
        except ConfigError as error:
            problems.append((overrides, error.problems))
            continue
        if (first := points.setdefault(point.run_dir, point)) is not point:
            problems.append((overrides, [_format_shared_dir_problem(point, first)]))
    lines = _format_problems(problems, job_overrides)
    if lines and not (prune and points):
        raise ConfigError(*lines)
    for line in lines:
        print(f"skipped: {line}")
    for overrides, point_problems in problems:
        sweep_log.log_skipped_point(Path(config.hydra.sweep.dir), overrides, point_problems)
    if prune:
        return sorted(points.values(), key=lambda p: -(p.planned_tokens_per_second or 0.0))
    return [*points.values()]


def find_shared_overrides(job_overrides: Sequence[Sequence[str]]) -> frozenset[str]:
    """Return the overrides that all points have."""
    first, *others = map(frozenset, job_overrides)
    return first.intersection(*others)


def format_swept(overrides: Sequence[str], shared: Collection[str]) -> str:
    """Return the overrides of a point that not all points have; all of them for a single point."""
    varying = [word for word in overrides if word not in shared]
    return " ".join(varying or overrides)


def _format_problems(
    problems: Sequence[tuple[Sequence[str], Sequence[str]]], job_overrides: Sequence[Sequence[str]]
) -> list[str]:
    """Return the problems after the overrides of their point; one of all points occurs once."""
    counts = Counter(line for _, lines in problems for line in lines)
    of_all = [line for line, count in counts.items() if 1 < count == len(job_overrides)]
    shared = find_shared_overrides(job_overrides)
    return of_all + [
        f"[{format_swept(overrides, shared)}] {line}"
        for overrides, lines in problems
        for line in lines
        if line not in of_all
    ]


def _format_shared_dir_problem(point: SweepPoint, first: SweepPoint) -> str:
    problem = f"has the run directory {point.run_dir} of [{' '.join(first.overrides)}]"
    keys = [word.partition("=")[0] for word in point.overrides if word not in first.overrides]
    if any(word.startswith("run.name=") for word in point.overrides):
        return f"{problem}; omit run.name, or give each point its own"
    if not keys:
        return f"{problem}; remove the duplicate"
    # A run continues with other settings of these keys, so they are not part of its name
    names = f"add run.name='NAME-${{{keys[0]}}}'" if "." in keys[0] else "set run.name per point"
    return f"{problem}, since {' and '.join(keys)} does not change the name of a run; {names}"


def get_hydra_flags(config: DictConfig) -> list[str]:
    """Return the command-line arguments for Hydra itself, which all points share."""
    overrides: Any = OmegaConf.to_container(config.hydra.overrides.hydra, resolve=False)
    shared = [arg for arg in overrides if not arg.startswith("hydra.mode=")]
    return [*build_config_dir_flags(config.hydra), *shared]


def build_group_environment(sweep_dir: Path, points: Sequence[SweepPoint]) -> dict[str, str]:
    """Return the variable that groups the runs of a sweep in W&B.

    Empty for a single run, or if the user has set the variable.
    """
    if len(points) == 1 or _WANDB_GROUP_VARIABLE in os.environ:
        return {}
    return {_WANDB_GROUP_VARIABLE: sweep_dir.name}


def get_entry_point(task_function: TaskFunction) -> str:
    """Return the name of the entry point, such as "train", from the file of its task."""
    file = Path(inspect.unwrap(task_function).__code__.co_filename)
    return file.parent.name if file.stem == "__main__" else file.stem


def record_point(
    sweep_dir: Path, number: int, point: SweepPoint, run_dir: Path, job_id: str | None = None
) -> None:
    """Log a point to the sweep directory, with the job id of the scheduler."""
    details = {"job": job_id, "planned_tokens_per_second": point.planned_tokens_per_second}
    details = {key: value for key, value in details.items() if value is not None}
    sweep_log.log_point(sweep_dir, number, run_dir, point.overrides, details)


def build_job_return(
    point: SweepPoint, number: int, job_id: str, receipt: Any = None
) -> PointReturn:
    """Return Hydra's record of a point that was run or submitted; `receipt` is its result."""
    assert point.config.run.name is not None, "resolve_config sets the name"
    name = (point.config.run.name, number, job_id)
    job_return = PointReturn(point.composer, point.overrides, *name)
    job_return.working_dir, job_return.return_value = str(point.run_dir), receipt
    return job_return


def _validate_point(
    composer: PointComposer,
    overrides: Sequence[str],
    composition: tuple[DictConfig, DictConfig],
    sections: dict[str, Any],
) -> SweepPoint:
    """Return a point if it is valid.

    `composition` is that of `PointComposer.compose`, and `sections` are those of other points by
    their text.
    """
    composed, hydra_config = composition
    try:
        resolved = resolve_config(composed)
    except OmegaConfBaseException as error:
        raise convert_hydra_error(error) from error
    if missing := find_missing_axes(hydra_config):
        studies = next((word for word in overrides if word.startswith("+sweep=")), "")
        raise ConfigError(
            f"the study's parameters {', '.join(missing)} are not set; start one sweep with "
            f"{studies or 'its +sweep=NAME'} alone"
        )
    validate_feasibility(resolved)
    composed.run.name = resolved.run.name
    text = zlib.compress(format_config(composed).encode(), level=1)
    point = SweepPoint(overrides, _reuse_sections(resolved, sections), text, composer)
    from hlat.checkpoint.start_validation import validate_start  # numpy slows composition

    validate_start(resolved, point.run_dir)
    return point


def _reuse_sections(config: Config, sections: dict[str, Any]) -> Config:
    """Return a configuration with the sections of earlier ones that have the same text."""
    own = {field.name: getattr(config, field.name) for field in fields(config)}
    return replace(config, **{k: sections.setdefault(f"{k}={v!r}", v) for k, v in own.items()})
