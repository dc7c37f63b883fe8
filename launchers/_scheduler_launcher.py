"""Base class of the launchers that submit jobs to a scheduler."""

from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from hlat.config.config_errors import ConfigError
from hlat.jobs.evaluation_job import EvaluationJob

from ._sweep_points import get_entry_point, get_hydra_flags


class SchedulerLauncher(Launcher):
    """Hydra launcher that submits jobs without waiting for them."""

    name: ClassVar[str]
    """Value of hydra/launcher."""
    schema: ClassVar[type]
    """Schema of hydra.launcher."""
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
            ConfigError: The entry point is not hlat.train.
        """
        if (name := get_entry_point(task_function)) != "train":
            raise ConfigError(f"hydra/launcher={self.name} runs hlat.train, not hlat.{name}")
        self.context, self.config = hydra_context, config
        self.hydra_flags = get_hydra_flags(config)

    @abstractmethod
    def submit_evaluation(self, evaluation: EvaluationJob, directory: Path) -> None:
        """Submit an evaluation as a job and print its receipt.

        Args:
            evaluation: Evaluation to submit.
            directory: Sweep directory, for the files of the job.

        Raises:
            ConfigError: The scheduler rejects the job, or the same evaluation is active. Nothing is
                submitted then.
        """

    def validate_no_pruning(self) -> None:
        """Raise ConfigError if the settings prune points, which an evaluation does not have."""
        if self.settings.prune:
            raise ConfigError("hydra.launcher.prune=true is for sweeps; an evaluation is one job")
