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
    file = run / "config.yaml"
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from error
    return values(text, str(file), *keys)


def values(text: str, told: str, *keys: str) -> list[Any]:
    """The values of some keys of a configuration in YAML; None for one that it lacks.

    Args:
        text: The YAML.
        told: Where it stands, for messages.
        keys: Full keys.

    Raises:
        ConfigError: As of `settings`.
    """
    try:
        config = OmegaConf.create(text)
        return [OmegaConf.select(config, key) for key in keys]
    except Exception as error:  # those of YAML, of OmegaConf and of a text of another shape
        reason = (str(error).splitlines() or [repr(error)])[0]
        raise ConfigError(f"{told}: {reason}") from error
