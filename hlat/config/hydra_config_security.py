"""Validation that Hydra's section of the configuration names no code to run.

Hydra calls the targets of `hydra.callbacks` and of a logging configuration, instantiates launcher
and sweeper with all nested targets, and sets environment variables that can make programs load
libraries, all before the first line of the program runs. A YAML file from an untrusted
`--config-dir` could thereby run arbitrary code, so these keys are errors.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from omegaconf import DictConfig, OmegaConf

from hlat.config.config_errors import ConfigError

HYDRA_PACKAGES = {"pkg://hydra.conf", "structured://"}
"""Entries of the search path that Hydra adds itself."""
_LOGGING_GROUPS = {"hydra_logging", "job_logging"}
_ALLOWED_LOGGING_KEYS = {"", "version", "disable_existing_loggers", "root", "root.level"}
"""Keys of a logging configuration that call no code."""
_PLUGIN_GROUPS = {"launcher", "sweeper"}
"""Groups with a target that Hydra only looks up among registered plugins."""
_SAFE_INTERPOLATION = re.compile(r"\$\{(?:(?:oc\.env|now|hydra):[^${}]*|[\w.\[\]]+)\}")
"""Interpolations that return a string or another value of the configuration."""


def refuse_rerun(arguments: Sequence[str]) -> None:
    """Raise ConfigError for Hydra's --experimental-rerun, which unpickles the file."""
    option = "--experimental-rerun"
    for argument in arguments:
        name = argument.partition("=")[0]
        if len(name) > len("--") and option.startswith(name):  # argparse accepts abbreviations
            raise ConfigError(
                f"{option} unpickles a file, which can run code, so hlat does not allow it; "
                "overrides.yaml in the run directory contains the overrides of a run"
            )


def validate_search_path(config_search_path: ConfigSearchPath) -> None:
    """Raise ConfigError if the search path contains a package, which Hydra would import."""
    for element in config_search_path.get_path():
        path = element.path or ""
        is_package = "://" in path and not path.startswith("file://")
        if is_package and path not in HYDRA_PACKAGES:
            raise ConfigError(
                f"{path} is a Python package, which Hydra would import to read its files; use a "
                "directory with --config-dir"
            )


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
