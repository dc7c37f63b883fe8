"""What the configuration that a run's folder records says, of this run or of another."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hlat.config.errors import ConfigError


def settings(run: Path, *keys: str) -> list[Any]:
    """The values of some keys of a run's config.yaml; None for one that it lacks.

    Args:
        run: The run's folder.
        keys: Full keys.

    Raises:
        ConfigError: One of them stands for a variable that is not set here, or the file is no
            configuration.
    """
    try:
        config = OmegaConf.load(run / "config.yaml")
        return [OmegaConf.select(config, key) for key in keys]
    except Exception as error:  # those of YAML, of OmegaConf and of a file of another shape
        reason = (str(error).splitlines() or [repr(error)])[0]
        raise ConfigError(f"{run / 'config.yaml'}: {reason}") from error
