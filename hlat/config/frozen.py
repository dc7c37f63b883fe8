"""A composed configuration as files, from which a job trains what was composed when it was sent.

A job may wait for days, and what it is to train must not change meanwhile: so it composes nothing,
and reads neither conf/ nor Hydra's plugins. Interpolations stay as they were typed: they refer to
the configuration itself, or to variables, which may be secrets and are no business of a file.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from hlat.config.errors import ConfigError
from hlat.config.run import Config

FLAG = "--frozen"
_CONFIG, _WORDS = "config.yaml", "words.json"


@dataclass(frozen=True)
class Words:
    """What the user typed."""

    overrides: list[str]
    """Of the configuration."""
    flags: list[str]
    """Before them: of Hydra itself and of its launcher."""


def save(
    folder: Path, composed: DictConfig, words: Words, changes: Mapping[str, Any] | None = None
) -> None:
    """Write a composed configuration, and what it was composed from, into a folder.

    Args:
        folder: It is there.
        composed: The configuration.
        words: What it was composed from.
        changes: Other values than it has, by key.
    """
    if changes:
        composed = OmegaConf.create(composed)
        for key, value in changes.items():
            OmegaConf.update(composed, key, value)
    (folder / _CONFIG).write_text(OmegaConf.to_yaml(composed))
    (folder / _WORDS).write_text(json.dumps(asdict(words), indent=2) + "\n")


def load(folder: Path) -> DictConfig:
    """Return the configuration that `save` wrote.

    Raises:
        ConfigError: The folder holds none.
        omegaconf.errors.OmegaConfBaseException: It does not fit the schema.
    """
    try:
        written = OmegaConf.load(folder / _CONFIG)
    except OSError as error:
        raise ConfigError(
            f"{FLAG} {folder}: {error.filename}: {error.strerror}; it is for jobs that a launcher "
            "sends, which writes that folder"
        ) from error
    return cast(DictConfig, OmegaConf.merge(OmegaConf.structured(Config), written))


def words(folder: Path) -> Words:
    """Return what the user typed."""
    return Words(**json.loads((folder / _WORDS).read_text()))
