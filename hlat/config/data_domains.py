"""Sources of a run from the directories of a directory: one domain of text each.

The directories are listed when a configuration is composed, before values of the command line are
applied, so that data.sources.NAME.weight=3 changes a weight, and a run records its sources.
"""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

from hlat.config.config_errors import ConfigError, raise_config_errors
from hlat.config.data import SourceConfig

DOMAINS_KEY = "data.domains"
HELDOUT_KEY = "data.heldout_domains"
TRAIN_NAME, HELDOUT_NAME = "train", "heldout"
"""Directories of a domain that `hlat prepare heldout=` writes."""
_DATA_SUFFIXES = (".arrow", ".parquet", ".pq")
_VALID_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_RESERVED_NAMES = ("mean", "null", "true", "false", "nan", "inf")
"""Names with another meaning in overrides, and that of the mean over held-out sets."""
_NUM_NAMED = 3


def add_domains(config: DictConfig, overrides: Sequence[Override]) -> None:
    """Add the sources of data.domains and the held-out text of data.heldout_domains, if set.

    Args:
        config: Composed configuration without the values of the command line.
        overrides: Overrides of the command line.

    Raises:
        ConfigError: A directory cannot be listed or is empty, has files beside its directories, or
            a name or the content of one of them is not that of a source.
    """
    if config.get("data") is None:
        return
    root = str(_select(config, overrides, "data.root") or ".")
    domains = _select(config, overrides, DOMAINS_KEY)
    heldout = _select(config, overrides, HELDOUT_KEY)
    if domains is not None:
        with open_dict(config.data):
            config.data.name = Path(domains).resolve().name
            config.data.sources = _find_sources(DOMAINS_KEY, root, str(domains))
    if heldout is not None:
        _add_heldout(config.data.sources, root, str(heldout))


def clear_domains(config: DictConfig) -> None:
    """Set the keys of the directories to null, as the composed sources replace them."""
    if config.get("data") is not None:
        config.data.domains = config.data.heldout_domains = None


def list_domains(key: str, directory: Path) -> list[Path]:
    """Return the directories in a directory, sorted by name; hidden ones are omitted.

    Args:
        key: Setting with the directory, for messages.
        directory: Directory with one directory per domain.

    Raises:
        ConfigError: It cannot be listed, has files or no directories, or a name is not valid for a
            source.
    """
    try:
        entries = [path for path in directory.iterdir() if not path.name.startswith(".")]
    except OSError as error:
        raise ConfigError(
            f"{key}={directory} cannot be listed ({error.strerror}); give a local directory with "
            "one directory per source"
        ) from None  # a cause would replace the message
    raise_config_errors(_find_problems(key, directory, entries))
    return sorted(entries, key=lambda path: path.name)


def _find_problems(key: str, directory: Path, entries: Sequence[Path]) -> Iterator[str]:
    """Yield problems of the entries of a directory that are not domains."""
    files = sorted(path.name for path in entries if not path.is_dir())
    names = sorted(path.name for path in entries if path.is_dir())
    if not names:
        yield (
            f"{key}={directory} has no directories; give a directory with one directory per source"
        )
    elif files:
        shown = ", ".join(files[:_NUM_NAMED])
        yield (
            f"{key}={directory} has {len(files):,} files beside its directories, such as {shown}; "
            "move them into the directory of their source, or away"
        )
    for name in names:
        if not _VALID_NAME.fullmatch(name) or name.lower() in _RESERVED_NAMES:
            yield (
                f"{key}: {directory / name} has a name that no source can have; rename it with "
                f"letters a to z, digits, - and _, a letter first, not {', '.join(_RESERVED_NAMES)}"
            )


def _select(config: DictConfig, overrides: Sequence[Override], key: str) -> Any:
    """Return the value of a key after the overrides, without those of an axis."""
    value = OmegaConf.select(config, key)
    for override in overrides:
        if override.key_or_group == key and not override.is_sweep_override():
            value = None if override.is_delete() else override.value()
    return value


def _find_sources(key: str, root: str, location: str) -> dict[str, SourceConfig]:
    """Return a source for each directory, with the bytes of its files as weight."""
    sources: dict[str, SourceConfig] = {}
    problems: list[str] = []
    for path in list_domains(key, _resolve(root, location)):
        name = path.name
        try:
            inner, num_bytes = _find_data_dir(key, path)
        except ConfigError as error:
            problems += error.problems
            continue
        own = [f"{location}/{name}/{HELDOUT_NAME}"] if (path / HELDOUT_NAME).is_dir() else []
        heldout = own if inner else []
        paths = [f"{location}/{name}/{inner}".rstrip("/")]
        sources[name] = SourceConfig(paths, float(num_bytes), heldout)
    raise_config_errors(problems)
    return sources


def _add_heldout(sources: DictConfig, root: str, location: str) -> None:
    """Set the held-out paths of the sources with a directory."""
    directory = _resolve(root, location)
    problems: list[str] = []
    for path in list_domains(HELDOUT_KEY, directory):
        if path.name not in sources:
            problems.append(
                f"{HELDOUT_KEY}: {path} has no source of its name; rename it to one of "
                f"{', '.join(sources)}, or add a source with weight 0"
            )
            continue
        try:
            inner, _ = _find_data_dir(HELDOUT_KEY, path)
        except ConfigError as error:
            problems += error.problems
            continue
        sources[path.name].heldout_paths = [f"{location}/{path.name}/{inner}".rstrip("/")]
    raise_config_errors(problems)


def _find_data_dir(key: str, directory: Path) -> tuple[str, int]:
    """Return the directory with the data of a domain, relative to it, and the bytes of its files.

    This is the directory itself or its `train`.
    """
    for inner in ("", TRAIN_NAME):
        if num_bytes := _count_bytes(directory / inner):
            return inner, num_bytes
    names = sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))
    content = f"has no Arrow or Parquet files, but {names[0]}" if names else "is empty"
    remedy = (
        f"convert the text with `hlat prepare {directory.parent} domains=true output=DIR` and set "
        f"{key}=DIR"
    )
    raise ConfigError(f"{key}: {directory} {content}; {remedy if names else 'fill or remove it'}")


def _count_bytes(directory: Path) -> int:
    """Return the size of the data files of a directory; 0 if it is missing."""
    if not directory.is_dir():
        return 0
    with os.scandir(directory) as entries:
        return sum(entry.stat().st_size for entry in entries if _is_data_file(entry))


def _is_data_file(entry: "os.DirEntry[str]") -> bool:
    return entry.name.endswith(_DATA_SUFFIXES) and entry.is_file()


def _resolve(root: str, location: str) -> Path:
    return Path(root).expanduser() / Path(location).expanduser()
