"""Conversion of a composed configuration to dataclasses, with validation.

All problems are reported at once.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hlat.config.config_errors import raise_config_errors
from hlat.config.config_validation import VALIDATORS
from hlat.config.hydra_errors import build_unknown_key_error
from hlat.config.run import Config
from hlat.config.run_identity import build_default_run_name


def resolve_config(composed: DictConfig) -> Config:
    """Return the validated configuration as dataclasses, with a run name.

    The result is never modified; derived values are properties and functions.

    Raises:
        ConfigError: Unknown keys, missing values, or one line for each problem.
    """
    config = convert_to_dataclasses(composed)
    raise_config_errors([problem for validate in VALIDATORS for problem in validate(config)])
    if config.run.name is None:
        run = dataclasses.replace(config.run, name=build_default_run_name(config))
        config = dataclasses.replace(config, run=run)
    return config


def convert_to_dataclasses(composed: DictConfig) -> Config:
    """Return the configuration as dataclasses, without validation of the values.

    Raises:
        ConfigError: Unknown keys or missing values.
    """
    for key in _find_unknown_keys(composed, ""):
        raise build_unknown_key_error(key)
    try:
        return cast(Config, OmegaConf.to_object(composed))
    except OmegaConfBaseException:
        missing = sorted(OmegaConf.missing_keys(composed))
        raise_config_errors(f"{key} is not set; give it a value" for key in missing)
        raise


def _find_unknown_keys(node: DictConfig | ListConfig, prefix: str) -> Iterator[str]:
    """Yield the keys below `node`, appended with `+`, that the schema does not have."""
    schema = OmegaConf.get_type(node)
    known = (
        {f.name for f in dataclasses.fields(schema)} if dataclasses.is_dataclass(schema) else None
    )
    keys: list[Any] = list(range(len(node)) if isinstance(node, ListConfig) else map(str, node))
    for key in keys:
        if known is not None and key not in known:
            yield f"{prefix}{key}"
        child: Any = node._get_node(key)
        if isinstance(child, (DictConfig, ListConfig)) and not child._is_none():
            yield from _find_unknown_keys(child, f"{prefix}{key}.")
