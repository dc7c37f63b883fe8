"""A composed configuration as it may be told to a service beyond the run folder.

Whoever looks at a run wants values, not references. But what `${oc.env:...}` stands for may be a
secret, so whatever a resolver would compute stays as it was typed, wherever it is referred to.
"""

import re
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf

from hlat.config.errors import ConfigError
from hlat.config.resolve import resolve
from hlat.config.run import Config

_REFERENCE = re.compile(r"\$\{[\w.\[\]]+\}")
"""To another key, by its name; whatever else stands in braces may ask a resolver."""


def told(config_yaml: str) -> dict[str, Any]:
    """Return the tree of a configuration with its references to other keys resolved.

    Args:
        config_yaml: What OmegaConf.to_yaml wrote, interpolations as they were typed.

    Raises:
        ConfigError: It is no configuration, or refers to what it has not.
    """
    try:
        tree = OmegaConf.to_container(_without_resolvers(config_yaml), resolve=True)
    except Exception as error:  # those of the parser and of its types
        raise ConfigError(f"not a configuration: {error}") from error
    return {str(key): value for key, value in tree.items()} if isinstance(tree, dict) else {}


def run_of(config_yaml: str) -> Config:
    """Return a run's configuration as dataclass objects, for who reads what has been run.

    Args:
        config_yaml: What OmegaConf.to_yaml wrote, interpolations as they were typed.

    Raises:
        ConfigError: It is not the configuration of a run, or not one that this version would run.
    """
    try:
        schema = OmegaConf.structured(Config)
        merged = OmegaConf.merge(schema, _without_resolvers(config_yaml))
        return resolve(cast(DictConfig, merged))
    except ConfigError:
        raise
    except Exception as error:  # those of the parser and of its types
        first = str(error).partition("\n")[0]
        raise ConfigError(f"not the configuration of a run: {first}") from error


def _without_resolvers(config_yaml: str) -> DictConfig | ListConfig:
    typed = OmegaConf.to_container(OmegaConf.create(config_yaml), resolve=False)
    inert: DictConfig | ListConfig = OmegaConf.create(_inert(typed))
    return inert


def _inert(value: Any) -> Any:
    """Return `value` with every text that may ask a resolver escaped."""
    if isinstance(value, dict):
        return {key: _inert(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_inert(item) for item in value]
    if isinstance(value, str) and "${" in _REFERENCE.sub("", value):
        return value.replace("${", r"\${")
    return value
