"""What launchers that send jobs away have in common: settings, and what they send.

Runs are sent as points of a sweep, by Hydra; an evaluation is one job, and its entry sends it.
"""

from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from hlat.config.errors import ConfigError
from hlat.jobs.evaluation import Evaluation

from ._points import entry, flags


class Sender(Launcher):
    """Hydra launcher that waits for nothing that it has sent."""

    name: ClassVar[str]
    """As in hydra/launcher=name."""
    schema: ClassVar[type]
    """Of hydra.launcher."""
    sees_files: ClassVar[bool]
    """Whether jobs have the files of the machine that sends them, at the same paths."""

    def __init__(self, **settings: Any) -> None:
        self.settings: Any = OmegaConf.to_object(
            OmegaConf.merge(OmegaConf.structured(self.schema), settings)
        )

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Remember what is swept.

        Raises:
            ConfigError: It is not hlat.train.
        """
        if (swept := entry(task_function)) != "train":
            raise ConfigError(f"hydra/launcher={self.name} trains, and cannot run hlat.{swept}")
        self.context, self.config = hydra_context, config
        self.flags = flags(config)

    @abstractmethod
    def evaluate(self, evaluation: Evaluation, folder: Path) -> None:
        """Send an evaluation as a job, and print its receipt.

        Args:
            evaluation: It.
            folder: Of what is sent by one command.

        Raises:
            ConfigError: It would be refused, or is alive already. Nothing was sent then.
        """

    def refuse_pruning(self) -> None:
        """Return if the settings do not speak of points, of which an evaluation has none.

        Raises:
            ConfigError: They do.
        """
        if self.settings.prune:
            raise ConfigError("hydra.launcher.prune=true is for sweeps; an evaluation is one job")
