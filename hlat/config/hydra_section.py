"""What Hydra's own section may hold: settings, and nothing that names code.

Hydra calls what `hydra.callbacks` and the parts of a logging configuration name, builds launcher
and sweeper with everything named inside of them, and sets variables that make programs load
libraries, all before the first line of the program that it composes for. So a YAML file that came
with somebody's `--config-dir` could run code of its author's choice, and is refused first.
"""

import re
from collections.abc import Iterator
from typing import Any

from hydra._internal import hydra as machinery
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig, OmegaConf

from hlat.config.errors import ConfigError

_LOGGING = {"version": None, "disable_existing_loggers": None, "root": {"level": None}}
"""The keys of a logging configuration that call nothing."""
_PLUGINS = ("hydra.launcher._target_", "hydra.sweeper._target_")
"""The classes that Hydra looks for among registered plugins only."""
_PLAIN = re.compile(r"\$\{(?:(?:oc\.env|now|hydra):[^${}]*|[\w.\[\]]+)\}")
"""Interpolations that give a text, or what stands elsewhere in the configuration."""


class InertLoader(ConfigLoaderImpl):
    """Composes as Hydra does, and refuses what it composed if it names code."""

    def load_configuration(self, *arguments: Any, **options: Any) -> DictConfig:
        """Compose.

        Raises:
            ConfigError: Hydra would run something that the configuration names.
        """
        config = super().load_configuration(*arguments, **options)
        if problems := list(named_code(config)):
            raise ConfigError(*problems)
        return config


def install() -> None:
    """Have every composition of this process checked; Hydra has no hook for it."""
    known = vars(machinery)
    assert known["ConfigLoaderImpl"] in (ConfigLoaderImpl, InertLoader)
    known["ConfigLoaderImpl"] = InertLoader


def named_code(config: DictConfig) -> Iterator[str]:
    """Tell of every key by which a configuration names code to run."""
    content: Any = OmegaConf.to_container(config, resolve=False, throw_on_missing=False)
    section = content["hydra"]
    found = [key for key in _targets(content, "") if key not in _PLUGINS]
    found += [f"hydra.callbacks.{name}" for name in section.get("callbacks") or {}]
    for kind in ("hydra_logging", "job_logging"):
        found += _beyond(section[kind], _LOGGING, f"hydra.{kind}")
    for kind in ("launcher", "sweeper"):
        found += _computed(section[kind], f"hydra.{kind}")
    for key in dict.fromkeys(found):
        yield f"{key} may name code to run, which no configuration of hlat does; remove it"
    for name in section["job"].get("env_set") or {}:
        yield (
            f"hydra.job.env_set.{name}: variables can make programs load code, and no "
            "configuration of hlat sets any; set it where you start hlat"
        )


def _targets(content: Any, key: str) -> Iterator[str]:
    """The keys that Hydra would look up and call."""
    for inner, value in _items(content, key):
        if inner.rpartition(".")[2] == "_target_":
            yield inner
        yield from _targets(value, inner)


def _computed(content: Any, key: str) -> Iterator[str]:
    """The keys whose values a resolver computes, which could make a part with code in it."""
    if isinstance(content, str) and "${" in _PLAIN.sub("", content):
        yield key
    for inner, value in _items(content, key):
        yield from _computed(value, inner)


def _beyond(content: Any, known: Any, key: str) -> Iterator[str]:
    """The keys of a logging configuration that `known` has not."""
    if known is not None and content is not None and not isinstance(content, dict):
        yield key
    for inner, value in _items(content, key):
        name = inner.removeprefix(f"{key}.")
        if known is None or name not in known:
            yield inner
        else:
            yield from _beyond(value, known[name], inner)


def _items(content: Any, key: str) -> Iterator[tuple[str, Any]]:
    """What lies in a mapping or list, by full key."""
    if isinstance(content, (dict, list)):
        pairs = content.items() if isinstance(content, dict) else enumerate(content)
        yield from ((f"{key}.{name}".lstrip("."), value) for name, value in pairs)
