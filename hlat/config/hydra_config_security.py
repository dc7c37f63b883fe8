"""Validation that Hydra's section of the configuration names no code to run.

Hydra calls the targets of `hydra.callbacks` and of a logging configuration, instantiates launcher
and sweeper with all nested targets, and sets environment variables that can make programs load
libraries, all before the first line of the program runs. A YAML file from an untrusted
`--config-dir` could thereby run arbitrary code, so these keys are errors.
"""

import re
from collections.abc import Iterator
from typing import Any

from hydra._internal import hydra as hydra_internal
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig, OmegaConf

from hlat.config.config_errors import ConfigError

_ALLOWED_LOGGING_KEYS = {"version": None, "disable_existing_loggers": None, "root": {"level": None}}
"""Keys of a logging configuration that call no code."""
_PLUGIN_TARGET_KEYS = ("hydra.launcher._target_", "hydra.sweeper._target_")
"""Targets that Hydra only looks up among registered plugins."""
_SAFE_INTERPOLATION = re.compile(r"\$\{(?:(?:oc\.env|now|hydra):[^${}]*|[\w.\[\]]+)\}")
"""Interpolations that return a string or another value of the configuration."""


class SafeConfigLoader(ConfigLoaderImpl):
    """Hydra's configuration loader with a check for references to code."""

    def load_configuration(self, *args: Any, **kwargs: Any) -> DictConfig:
        """Compose the configuration.

        Raises:
            ConfigError: The configuration names code that Hydra would run.
        """
        config = super().load_configuration(*args, **kwargs)
        if problems := list(find_code_references(config)):
            raise ConfigError(*problems)
        return config


def install_safe_config_loader() -> None:
    """Replace Hydra's configuration loader in this process; Hydra has no hook for it."""
    namespace = vars(hydra_internal)
    assert namespace["ConfigLoaderImpl"] in (ConfigLoaderImpl, SafeConfigLoader)
    namespace["ConfigLoaderImpl"] = SafeConfigLoader


def find_code_references(config: DictConfig) -> Iterator[str]:
    """Yield an error message for every key that names code to run."""
    content: Any = OmegaConf.to_container(config, resolve=False, throw_on_missing=False)
    section = content["hydra"]
    keys = [key for key in _find_target_keys(content, "") if key not in _PLUGIN_TARGET_KEYS]
    keys += [f"hydra.callbacks.{name}" for name in section.get("callbacks") or {}]
    for name in ("hydra_logging", "job_logging"):
        keys += _find_disallowed_keys(section[name], _ALLOWED_LOGGING_KEYS, f"hydra.{name}")
    for name in ("launcher", "sweeper"):
        keys += _find_resolver_keys(section[name], f"hydra.{name}")
    for key in dict.fromkeys(keys):
        yield f"{key} may name code to run, which hlat does not allow in a configuration; remove it"
    for name in section["job"].get("env_set") or {}:
        yield (
            f"hydra.job.env_set.{name}: environment variables can make programs load code, so hlat "
            "does not allow them in a configuration; set the variable before you start hlat"
        )


def _find_target_keys(content: Any, key: str) -> Iterator[str]:
    """Yield the keys of values that Hydra would import and call."""
    for inner, value in _iterate_items(content, key):
        if inner.rpartition(".")[2] == "_target_":
            yield inner
        yield from _find_target_keys(value, inner)


def _find_resolver_keys(content: Any, key: str) -> Iterator[str]:
    """Yield the keys of values that a resolver computes, which could create a target."""
    if isinstance(content, str) and "${" in _SAFE_INTERPOLATION.sub("", content):
        yield key
    for inner, value in _iterate_items(content, key):
        yield from _find_resolver_keys(value, inner)


def _find_disallowed_keys(content: Any, allowed: Any, key: str) -> Iterator[str]:
    """Yield the keys of a logging configuration that are not in `allowed`."""
    if allowed is not None and content is not None and not isinstance(content, dict):
        yield key
    for inner, value in _iterate_items(content, key):
        name = inner.removeprefix(f"{key}.")
        if allowed is None or name not in allowed:
            yield inner
        else:
            yield from _find_disallowed_keys(value, allowed[name], inner)


def _iterate_items(content: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield the items of a mapping or list by full key."""
    if isinstance(content, (dict, list)):
        pairs = content.items() if isinstance(content, dict) else enumerate(content)
        yield from ((f"{key}.{name}".lstrip("."), value) for name, value in pairs)
