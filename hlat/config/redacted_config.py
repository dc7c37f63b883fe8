"""Composed configuration without secrets, for tracking services and reports.

References to other keys are resolved. Interpolations with a resolver, such as `${oc.env:...}`, may
return a secret and remain unresolved, also where other keys refer to them.
"""

import re
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf

from hlat.config.config_errors import ConfigError
from hlat.config.resolve import resolve_config
from hlat.config.run import Config

_KEY_INTERPOLATION = re.compile(r"\$\{[\w.\[\]]+\}")
"""Reference to another key by its name; any other interpolation may call a resolver."""


def redact(config_yaml: str) -> dict[str, Any]:
    """Return a configuration in YAML with references to other keys resolved.

    Raises:
        ConfigError: The text is not a configuration, or refers to a missing key.
    """
    try:
        tree = OmegaConf.to_container(_escape_resolvers(config_yaml), resolve=True)
    except Exception as error:  # of the parser and its types
        raise ConfigError(f"not a configuration: {error}") from error
    return {str(key): value for key, value in tree.items()} if isinstance(tree, dict) else {}


def parse_run_config(config_yaml: str) -> Config:
    """Return the redacted configuration of a run, given in YAML, as validated dataclasses.

    Raises:
        ConfigError: The text is not the configuration of a run, or is invalid in this version.
    """
    try:
        schema = OmegaConf.structured(Config)
        merged = OmegaConf.merge(schema, _escape_resolvers(config_yaml))
        return resolve_config(cast(DictConfig, merged))
    except ConfigError:
        raise
    except Exception as error:  # of the parser and its types
        first_line = str(error).partition("\n")[0]
        raise ConfigError(f"not the configuration of a run: {first_line}") from error


def _escape_resolvers(config_yaml: str) -> DictConfig | ListConfig:
    tree = OmegaConf.to_container(OmegaConf.create(config_yaml))
    escaped: DictConfig | ListConfig = OmegaConf.create(_escape_value(tree))
    return escaped


def _escape_value(value: Any) -> Any:
    """Return `value` with every string escaped that may call a resolver."""
    if isinstance(value, dict):
        return {key: _escape_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape_value(item) for item in value]
    if isinstance(value, str) and "${" in _KEY_INTERPOLATION.sub("", value):
        return value.replace("${", r"\${")
    return value
