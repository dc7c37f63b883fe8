"""From the composed configuration to plain dataclasses, or to all reasons why it cannot run.

A user who is told of one mistake at a time starts a run many times; so all are told at once.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf

from hlat.config.errors import ConfigError
from hlat.config.explain import unknown_key
from hlat.config.identity import default_name
from hlat.config.rules import RULES
from hlat.config.run import Config


def resolve(composed: DictConfig) -> Config:
    """Return the configuration as dataclass objects, with the run named.

    The result is never changed afterwards; derived values are properties and functions.

    Raises:
        ConfigError: Keys that do not exist, values that are missing, and every violated rule, one
        line each.
    """
    config = typed(composed)
    problems = [problem for rule in RULES for problem in rule(config)]
    if problems:
        raise ConfigError(*problems)
    if config.run.name is None:
        named = dataclasses.replace(config.run, name=default_name(config))
        config = dataclasses.replace(config, run=named)
    return config


def typed(composed: DictConfig) -> Config:
    """Return the configuration as dataclass objects, whatever the rules say of it.

    Raises:
        ConfigError: Keys that do not exist, and values that are missing.
    """
    _check_complete(composed)
    return cast(Config, OmegaConf.to_object(composed))


def _check_complete(composed: DictConfig) -> None:
    """Refuse keys appended with `+` that the schema does not know, and values nobody set."""
    for key in _appended(composed, ""):
        raise unknown_key(key)
    missing = OmegaConf.missing_keys(composed)
    if missing:
        raise ConfigError(*(f"{key} is not set; give it a value" for key in sorted(missing)))


def _appended(node: DictConfig | ListConfig, prefix: str) -> Iterator[str]:
    """Yield the keys in and below `node` that the dataclass at their place does not have."""
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
            yield from _appended(child, f"{prefix}{key}.")
