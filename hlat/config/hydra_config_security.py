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

_LOGGING_GROUPS = {"hydra_logging", "job_logging"}
_ALLOWED_LOGGING_KEYS = {"", "version", "disable_existing_loggers", "root", "root.level"}
"""Keys of a logging configuration that call no code."""
_PLUGIN_GROUPS = {"launcher", "sweeper"}
"""Groups with a target that Hydra only looks up among registered plugins."""
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
    found: list[str] = []
    for key, value in _iterate_nodes(content, ""):
        is_below_found = any(key.startswith(f"{other}.") for other in found)
        if not is_below_found and _may_name_code(key, value):
            found.append(key)
            yield (
                f"{key} may name code to run, which hlat does not allow in a configuration; remove "
                "it"
            )
    for name in content["hydra"]["job"].get("env_set") or {}:
        yield (
            f"hydra.job.env_set.{name}: environment variables can make programs load code, so hlat "
            "does not allow them in a configuration; set the variable before you start hlat"
        )


def _may_name_code(key: str, value: Any) -> bool:
    """Return True if Hydra could import and call the value of a key."""
    section, _, rest = key.partition(".")
    group, _, name = rest.partition(".") if section == "hydra" else ("", "", "")
    is_mapping = value is None or isinstance(value, dict)
    if group == "callbacks":
        return name != "" or not is_mapping
    if group in _LOGGING_GROUPS:
        return name not in _ALLOWED_LOGGING_KEYS or (name in ("", "root") and not is_mapping)
    is_plugin = group in _PLUGIN_GROUPS
    if is_plugin and isinstance(value, str) and "${" in _SAFE_INTERPOLATION.sub("", value):
        return True
    return key.rpartition(".")[2] == "_target_" and not (is_plugin and name == "_target_")


def _iterate_nodes(content: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield all values below a mapping or list by full key, parents first."""
    if isinstance(content, (dict, list)):
        pairs = content.items() if isinstance(content, dict) else enumerate(content)
        for name, value in pairs:
            yield f"{prefix}{name}", value
            yield from _iterate_nodes(value, f"{prefix}{name}.")
