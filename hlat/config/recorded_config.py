"""Values of the configuration that a run directory records."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hlat.config.config_errors import ConfigError


def load_recorded_settings(run_dir: Path, *keys: str) -> list[Any]:
    """Return the values of full keys in a run's config.yaml, with None for missing keys.

    Raises:
        ConfigError: The file is not a configuration, or a value refers to an environment variable
            that is not set.
    """
    file = run_dir / "config.yaml"
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from error
    return select_yaml_values(text, str(file), *keys)


def select_yaml_values(text: str, source: str, *keys: str) -> list[Any]:
    """Return the values of full keys in a YAML text, with None for missing keys.

    Raises:
        ConfigError: As for `load_recorded_settings`; `source` is its name in the message.
    """
    try:
        config = OmegaConf.create(text)
        return [OmegaConf.select(config, key) for key in keys]
    except Exception as error:  # of YAML, of OmegaConf, or of data of another shape
        reason = (str(error).splitlines() or [repr(error)])[0]
        raise ConfigError(f"{source}: {reason}") from error
