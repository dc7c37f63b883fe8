"""What launchers that send jobs away have in common: settings, and that training alone is sent."""

from typing import Any, ClassVar

from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from hlat.config.errors import ConfigError

from ._points import entry, flags


class Sender(Launcher):
    """Hydra launcher that waits for nothing that it has sent."""

    name: ClassVar[str]
    """As in hydra/launcher=name."""
    schema: ClassVar[type]
    """Of hydra.launcher."""

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
