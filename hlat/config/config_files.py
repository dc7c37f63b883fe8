"""YAML files of config groups: search path, location of a key, and the package header."""

import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from hlat.config.package_dirs import find_package_dir

_CONFIG_DIR_FLAGS = ("--config-dir", "-cd", "config_dir")
_PACKAGE_HEADER = re.compile(r"\s*#\s*@package\s+(\S+)")
"""Hydra reads it only before all other comments and keys."""


def list_user_config_dirs() -> list[Path]:
    """Return the directories of `--config-dir` on the command line of this process."""
    typed = [word for flag in _CONFIG_DIR_FLAGS for word in _find_flag_values(flag, sys.argv)]
    return [Path(word) for word in typed]


def find_config_file(name: str) -> Path | None:
    """Return the file of a choice such as `model/7b`; None if no directory has one.

    The directories are those of `--config-dir` of the command line, then conf/.
    """
    directories = [*list_user_config_dirs(), find_package_dir("conf")]
    paths = [directory / f"{name}.yaml" for directory in directories]
    return next((path for path in paths if path.is_file()), None)


def find_package(path: Path) -> str | None:
    """Return the package in the header `# @package NAME` of a file; None without a header."""
    match = _PACKAGE_HEADER.match(path.read_text(encoding="utf-8", errors="replace"))
    return None if match is None else match[1]


def find_key(path: Path, key: str) -> tuple[str, int] | None:
    """Return a full key as it is written in a file, and its line; None if the file lacks it.

    A file of a group contains the key without the name of its package.
    """
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    parts = re.split(r"[.\[]", key.replace("]", ""))
    for start in range(len(parts)):
        if (line := _find_line(root, parts[start:])) is not None:
            return ".".join(parts[start:]), line
    return None


def _find_line(node: yaml.Node | None, parts: Sequence[str]) -> int | None:
    line = None
    for part in parts:
        if isinstance(node, yaml.MappingNode):
            entries = {entry.value: (entry, value) for entry, value in node.value}
            if part not in entries:
                return None
            entry, node = entries[part]
        elif isinstance(node, yaml.SequenceNode) and part.isdecimal():
            if int(part) >= len(node.value):
                return None
            entry = node = node.value[int(part)]
        else:
            return None
        line = int(entry.start_mark.line) + 1
    return line


def _find_flag_values(flag: str, words: Sequence[str]) -> list[str]:
    """Return the values of `FLAG VALUE` and `FLAG=VALUE`."""
    following = [value for word, value in itertools.pairwise(words) if word == flag]
    return following + [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]
