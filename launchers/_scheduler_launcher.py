"""Base class of the launchers that submit jobs to a scheduler."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from hlat.config import frozen_config
from hlat.config.command_job import CommandJob
from hlat.config.config_errors import ConfigError

from ._job_spec import JobSpec, build_job, build_object_name
from ._sweep_points import (
    SweepPoint,
    build_group_environment,
    build_job_return,
    get_entry_point,
    get_hydra_flags,
    record_point,
    validate_points,
)


def build_launcher_schema(settings: type) -> DictConfig:
    """Return the schema of hydra.launcher; a dictionary accepts new keys without Hydra's `+`."""
    schema = OmegaConf.structured(settings)
    for value in schema.values():
        if isinstance(value, DictConfig):
            OmegaConf.set_struct(value, False)
    assert isinstance(schema, DictConfig)
    return schema


class SchedulerLauncher(Launcher):
    """Hydra launcher that submits jobs without waiting for them."""

    name: ClassVar[str]
    """Value of hydra/launcher."""
    schema: ClassVar[type]
    """Schema of hydra.launcher."""
    validates_points: ClassVar[bool] = True
    """All points are composed before the first one starts (`config_loader.py`)."""
    shares_file_system: ClassVar[bool]
    """True if jobs see the files of the submitting machine at the same paths."""

    def __init__(self, **settings: Any) -> None:
        self.settings: Any = OmegaConf.to_object(
            OmegaConf.merge(OmegaConf.structured(self.schema), settings)
        )

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Store the context of the sweep.

        Raises:
            ConfigError: The entry point is not hlat.train, or the study stops points early.
        """
        if OmegaConf.select(config, "study.stop_worse", default=False):
            raise ConfigError(
                "study.stop_worse=true needs hydra/launcher=local, since a job of "
                f"{self.name} does not wait for the results of others; remove it"
            )
        if (name := get_entry_point(task_function)) != "train":
            raise ConfigError(f"hydra/launcher={self.name} runs hlat.train, not hlat.{name}")
        self.context, self.config = hydra_context, config
        self.hydra_flags = get_hydra_flags(config)

    @abstractmethod
    def submit_command(self, job: CommandJob, directory: Path) -> None:
        """Submit a command as a job and print its receipt.

        Args:
            job: Command to submit.
            directory: Sweep directory, for the files of the job.

        Raises:
            ConfigError: The scheduler rejects the job, or the same command is active. Nothing is
                submitted then.
        """

    @property
    def waits(self) -> bool:
        """True if jobs start after other jobs, so that their inputs may not exist yet."""
        return False

    def validate_no_pruning(self) -> None:
        """Raise ConfigError if the settings prune points, which a command does not have."""
        if self.settings.prune:
            raise ConfigError("hydra.launcher.prune=true is for sweeps; a command is one job")

    def build_jobs(
        self,
        job_overrides: Sequence[Sequence[str]],
        command: tuple[str, ...],
        working_directory: Path,
    ) -> list[tuple[SweepPoint, JobSpec]]:
        """Return the valid points of a sweep with their jobs; see `JobSpec` for the arguments.

        Raises:
            ConfigError: A point is invalid.
        """
        points = validate_points(self.context, self.config, job_overrides, self.settings.prune)
        group = build_group_environment(self.sweep_dir, points)
        jobs = [build_job(point.config, command, working_directory) for point in points]
        return [
            (point, replace(job, environment=group | job.environment))
            for point, job in zip(points, jobs, strict=True)
        ]

    @property
    def sweep_dir(self) -> Path:
        """Directory of the sweep."""
        return Path(self.config.hydra.sweep.dir)

    def write_configuration(self, point: SweepPoint, job: JobSpec) -> Path:
        """Write the composed configuration of a point, and return its new directory."""
        directory = self.sweep_dir / build_object_name(job.name)
        directory.mkdir(parents=True)
        command_line = frozen_config.CommandLine([*point.overrides], self.hydra_flags)
        point.save_configuration(directory, command_line)
        return directory

    def record_job(
        self, point: SweepPoint, job: JobSpec, number: int, receipt: dict[str, str]
    ) -> JobReturn:
        """Log a submitted point to the sweep directory, and return Hydra's record of it."""
        record_point(self.sweep_dir, number, point, job.run_dir)
        name = build_object_name(job.name)
        return build_job_return(point, number, name, {"run_folder": str(job.run_dir), **receipt})
