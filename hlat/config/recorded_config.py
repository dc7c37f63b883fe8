"""Configurations that runs record: selected values, and the redacted whole.

Tracking services and reports show configurations without secrets: references to other keys are
resolved, and interpolations with a resolver, such as `${oc.env:...}`, which may return a secret,
remain unresolved, also where other keys refer to them.
"""

import functools
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hlat.config import redaction
from hlat.config.bounds import find_bounds_violations
from hlat.config.components import create_schema_node, extend_schema
from hlat.config.config_errors import ConfigError
from hlat.config.config_json import parse_section
from hlat.config.renamed_keys import rename_config, rename_tree
from hlat.config.resolve import resolve_config
from hlat.config.run import Config
from hlat.config.study import StudyConfig
from hlat.config.yaml_loader import YAML_LOADER

_KEY_INTERPOLATION = re.compile(r"\$\{[\w.\[\]]+\}")
"""Reference to another key by its name; any other interpolation may call a resolver."""
_SPECIAL_YAML = re.compile(r"\$\{|[&*!]")
"""Interpolations, anchors and tags: OmegaConf reads texts with them, ten times slower."""

_STUDY_SECTION = re.compile(r"^study:.*\n(?:(?:[ \t#-].*)?\n)*", re.MULTILINE)
"""Lines of the section of the study."""


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


def select_yaml_values(
    text: str, source: str, *keys: str, overrides: Sequence[str] = ()
) -> list[Any]:
    """Return the values of full keys in a YAML text, with None for missing keys.

    `overrides` replace values of the text.

    Raises:
        ConfigError: As for `load_recorded_settings`; `source` is its name in the message.
    """
    redaction.install_resolver()
    try:
        recorded, _ = rename_config(OmegaConf.create(text))
        config = OmegaConf.merge(recorded, OmegaConf.from_dotlist(list(overrides)))
        values = [OmegaConf.select(config, key) for key in keys]
        return [
            OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            for value in values
        ]
    except Exception as error:  # of YAML, of OmegaConf, or of data of another shape
        reason = (str(error).splitlines() or [repr(error)])[0]
        raise ConfigError(f"{source}: {reason}") from error


def redact(config_yaml: str) -> dict[str, Any]:
    """Return a configuration in YAML with references to other keys resolved.

    Raises:
        ConfigError: The text is not a configuration, or refers to a missing key.
    """
    try:
        escaped = OmegaConf.create(_escape_resolvers(config_yaml))
        tree = OmegaConf.to_container(escaped, resolve=True)
    except Exception as error:  # of the parser and its types
        raise ConfigError(f"not a configuration: {error}") from error
    return {str(key): value for key, value in tree.items()} if isinstance(tree, dict) else {}


def load_flat_settings(config_yaml: str) -> dict[str, Any]:
    """Return the redacted settings of a run, given in YAML, by full key.

    Raises:
        ConfigError: As for `redact`.
    """
    return _flatten(_load_redacted(config_yaml))


def load_study_design(config_yaml: str) -> StudyConfig:
    """Return the design that a run records; the default one if it records none that is valid.

    Runs with the text of one design share an object.
    """
    sections = _STUDY_SECTION.findall(config_yaml)
    is_plain = sections and not _SPECIAL_YAML.search(config_yaml)
    return _parse_study_design(sections[-1] if is_plain else config_yaml)


@functools.lru_cache(maxsize=64)
def _parse_study_design(config_yaml: str) -> StudyConfig:
    try:
        section = _load_redacted(config_yaml).get("study")
        design = parse_section(StudyConfig, section if isinstance(section, dict) else {})
    except (ConfigError, OmegaConfBaseException):
        return StudyConfig()
    return StudyConfig() if any(find_bounds_violations(design)) else design


def parse_run_config(config_yaml: str) -> Config:
    """Return the redacted configuration of a run, given in YAML, as validated dataclasses.

    Raises:
        ConfigError: The text is not the configuration of a run, or is invalid in this version.
    """
    try:
        config = create_schema_node(extend_schema(Config))
        config.merge_with(_escape_resolvers(config_yaml))
        return resolve_config(config)
    except ConfigError:
        raise
    except Exception as error:  # of the parser and its types
        first_line = str(error).partition("\n")[0]
        raise ConfigError(f"not the configuration of a run: {first_line}") from error


def _load_redacted(config_yaml: str) -> dict[str, Any]:
    """Return the result of `redact`, in a tenth of the time for a text without special YAML."""
    if not _SPECIAL_YAML.search(config_yaml):
        with suppress(yaml.YAMLError, RecursionError, TypeError, ValueError):
            tree = yaml.load(config_yaml, YAML_LOADER)  # noqa: S506 (is safe)
            if isinstance(tree, dict):
                rename_tree(tree)
                return {str(key): value for key, value in tree.items()}
    return redact(config_yaml)


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {sys.intern(prefix): value} if prefix else {}
    leaves: dict[str, Any] = {}
    for key, item in value.items():
        leaves |= _flatten(item, f"{prefix}.{key}".lstrip("."))
    return leaves


def _escape_resolvers(config_yaml: str) -> Any:
    tree = OmegaConf.to_container(OmegaConf.create(config_yaml))
    rename_tree(tree)
    return _escape_value(tree)


def _escape_value(value: Any) -> Any:
    """Return `value` with every string escaped that may call a resolver."""
    if isinstance(value, dict):
        return {key: _escape_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape_value(item) for item in value]
    if isinstance(value, str) and "${" in _KEY_INTERPOLATION.sub("", value):
        return value.replace("${", r"\${")
    return value
