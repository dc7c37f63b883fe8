"""Composed configuration as files, for a job that runs later than its submission.

The job does not compose a configuration, or read conf/ or Hydra's plugins, so changes after the
submission have no effect. Interpolations are stored unresolved, as environment variables may
contain secrets.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hlat.config import extensions, redaction
from hlat.config.components import create_schema_node, extend_schema
from hlat.config.config_errors import ConfigError
from hlat.config.renamed_keys import rename_config
from hlat.config.run import Config

FROZEN_FLAG = "--frozen"
_CONFIG_FILE, _COMMAND_LINE_FILE = "config.yaml", "words.json"
_last_sections: dict[Any, tuple[str, str]] = {}
"""Representation and YAML of the section that was formatted last, by key."""


@dataclass(frozen=True)
class CommandLine:
    """Command-line arguments of the user."""

    overrides: list[str]
    """Overrides of the configuration."""
    flags: list[str]
    """Flags and overrides of Hydra and its launcher."""


def save_frozen_config(
    directory: Path,
    composed: DictConfig,
    command_line: CommandLine,
    updates: Mapping[str, Any] | None = None,
) -> None:
    """Write a composed configuration, its command line, and copies of its extensions.

    `directory` exists. The configuration is changed by `updates` by key.
    """
    if updates:
        composed = OmegaConf.create(composed)
        for key, value in updates.items():
            OmegaConf.update(composed, key, value)
    paths = composed.get(extensions.KEY) or ()
    save_frozen_yaml(directory, format_config(composed), paths, command_line)


def save_frozen_yaml(
    directory: Path, yaml: str, extension_paths: Iterable[str], command_line: CommandLine
) -> None:
    """Write the text of a composed configuration as `save_frozen_config`."""
    extensions.save_copies(directory, extension_paths)
    (directory / _CONFIG_FILE).write_text(yaml)
    (directory / _COMMAND_LINE_FILE).write_text(json.dumps(asdict(command_line), indent=2) + "\n")


def contains_config(directory: Path, yaml: str) -> bool:
    """Return True if `directory` contains the text of a configuration, saved without updates."""
    file = directory / _CONFIG_FILE
    return file.exists() and file.read_text() == yaml


def format_config(composed: DictConfig) -> str:
    """Return a composed configuration as YAML, with interpolations unresolved.

    The text is that of `OmegaConf.to_yaml`. Sections that equal those of the last call, as of most
    points of a sweep, are not formatted again.
    """
    content: Any = OmegaConf.to_container(composed, resolve=False, enum_to_str=True)
    if not content:
        return OmegaConf.to_yaml(composed)
    texts = []
    for key, section in content.items():
        description = repr(section)
        if (last := _last_sections.get(key)) is None or last[0] != description:
            _last_sections[key] = (description, OmegaConf.to_yaml({key: section}))
        texts.append(_last_sections[key][1])
    return "".join(texts)


def format_run_config(composed: DictConfig, name: str) -> str:
    """Return the composed configuration of a run as YAML, with the name of its directory."""
    composed.run.name = redaction.redact_text(name)
    return format_config(composed)


def load_frozen_config(directory: Path) -> DictConfig:
    """Return the configuration that `save_frozen_config` saved, after loading its extensions.

    Names of directories in it are resolved, so the variables of its command line are redacted.

    Raises:
        ConfigError: The directory contains no configuration.
        omegaconf.errors.OmegaConfBaseException: The configuration does not match the schema.
    """
    redaction.install_resolver()
    try:
        config, _ = rename_config(OmegaConf.load(directory / _CONFIG_FILE))
        redaction.record_expressions("\n".join(load_command_line(directory).overrides))
    except OSError as error:
        raise ConfigError(
            f"{FROZEN_FLAG} {directory}: {error.filename}: {error.strerror}; the flag is for jobs "
            "of a launcher, which writes that directory"
        ) from error
    for path in OmegaConf.select(config, extensions.KEY) or ():
        extensions.load_extension(str(directory / Path(path).name), path)
    frozen = create_schema_node(extend_schema(Config))
    frozen.merge_with(config)
    return frozen


def load_command_line(directory: Path) -> CommandLine:
    """Return the command line that `save_frozen_config` saved."""
    return CommandLine(**json.loads((directory / _COMMAND_LINE_FILE).read_text()))
