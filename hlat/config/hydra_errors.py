"""Conversion of Hydra's and OmegaConf's errors to one line with the key and the closest match."""

import dataclasses
import difflib
import json
import re
import shlex
import sys
import typing
from collections.abc import Sequence
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.errors import OverrideParseException

from hlat.config import config_files
from hlat.config.components import CHOICE_SCHEMAS, extend_schema
from hlat.config.config_errors import ConfigError
from hlat.config.package_dirs import list_choices
from hlat.config.run import Config

_LAUNCHER_KEY, _DEFAULT_LAUNCHER = "hydra.launcher", "local"
_OPTION_KEYS = (f"{_LAUNCHER_KEY}.options", f"{_LAUNCHER_KEY}.srun_options")
"""Keys with entries that the user adds."""


def convert_hydra_error(error: Exception) -> ConfigError:
    """Return a ConfigError with the full key and a remedy, or the error itself if it is one."""
    if isinstance(error, ConfigError):
        return error
    text = str(error)
    if isinstance(error, OverrideParseException):
        return _build_syntax_error(error.override, _format_first_line(error))
    is_yaml_error = hasattr(error.__cause__ or error, "problem_mark")
    if not is_yaml_error and (file := _find_file_without_package()) is not None:
        return _build_package_error(*file)
    if match := re.match(r"In '([^']+)': \w+ raised while composing config:\s*(.*)", text):
        return _build_file_error(match[1], match[2], _parse_full_key(text))
    if match := re.search(r"Ambiguous value for argument '(\+sweep=.+)'", text):
        return ConfigError(f"{match[1]} lists several studies; start one hlat sweep per study")
    if match := re.search(r"Ambiguous value for argument '(.+)'", text):
        return ConfigError(f"{match[1]} lists several values; add -m for one run per value")
    if match := re.search(r"Sweeping over Hydra's configuration .*'([^']+)'", text):
        return _build_hydra_sweep_error(match[1])
    if "Got NoneType" in text:
        return ConfigError("a group cannot be null; name one of its choices, such as model=tiny")
    repeated = r"Multiple values for (\S+)\. |^(\S+) appears more than once in the final defaults"
    if match := re.search(repeated, text):
        return _build_added_group_error(match[1] or match[2], text)
    if match := re.search(r"Could not override '([^'@]+)", text):
        return build_unknown_key_error(match[1])
    if match := re.search(r"Could not append to config\. An item is already at '([^']+)'", text):
        return ConfigError(f"{match[1]} already has a value; write {match[1]}=... without the +")
    if match := re.search(r"Could not find '([^']+)/([^']+)'", text):
        found = getattr(error, "options", None)
        return _build_unknown_choice_error(match[1], match[2], found or list_choices(match[1]))
    if match := re.search(r"Key '([^']+)' (?:not in|is not in struct)", text):
        key = _parse_full_key(text) or match[1]
        if key.rpartition(".")[2].partition("[")[0] != match[1] and match[1] not in key:
            return ConfigError(f"{key}: {match[1]} is not a valid key")
        return build_unknown_key_error(key)
    if isinstance(error, OSError) and error.filename:
        return ConfigError(
            f"{error.filename} cannot be used ({error.strerror}); set hydra.run.dir, in a sweep "
            "hydra.sweep.dir, to a directory that you can write to"
        )
    if isinstance(error, (TypeError, RecursionError, AttributeError)):  # Hydra does not check types
        return ConfigError(
            f"the configuration cannot be composed ({type(error).__name__}: {error}); correct the "
            "overrides and files, or set HYDRA_FULL_ERROR=1 to print the traceback"
        )
    return ConfigError(_format_first_line(error))


def _build_syntax_error(override: str, problem: str) -> ConfigError:
    """Return the error for a word that Hydra's grammar does not accept."""
    key, equals, value = override.partition("=")
    if not equals and override.endswith((".yaml", ".yml")):
        return ConfigError(
            f"{override} is a file, not GROUP.KEY=VALUE; move it to DIR/GROUP/NAME.yaml and write "
            "--config-dir DIR GROUP=NAME"
        )
    if re.match(r"\[?~/", value):
        return ConfigError(
            f"{override}: ~ is not expanded here; write {key}={value.replace('~/', '$HOME/')}"
        )
    if value and problem.startswith("Lexer"):
        quoted = shlex.quote(f"{key}={json.dumps(value, ensure_ascii=False)}")
        return ConfigError(
            f"{override}: the value has a character that needs quotes, also inside those of the "
            f"shell; write {quoted}"
        )
    if problem.startswith(("Lexer", "Error parsing override")):
        problem = "is not an override"
    return ConfigError(f"{override}: {problem}; write GROUP.KEY=VALUE")


def _find_file_without_package() -> tuple[Path, str] | None:
    """Return a file of the command line with keys of several groups but no package, and its group.

    Directories such as experiment and sweep are no groups of the configuration.
    """
    groups = typing.get_type_hints(Config)
    for word in sys.argv[1:]:
        group, _, names = word.lstrip("+").partition("=")
        if "." in group or "/" in group or group in groups:
            continue
        for name in names.split(","):
            path = config_files.find_config_file(f"{group}/{name}")
            if path is not None and config_files.find_package(path) is None:
                return path, group
    return None


def _build_package_error(path: Path, group: str) -> ConfigError:
    remedy = f"add it, or write only keys of {group}"
    return ConfigError(
        f"{path}: its keys are those of {group}, as the file lacks the first line "
        f"`# @package _global_`; {remedy if group in typing.get_type_hints(Config) else 'add it'}"
    )


def _build_added_group_error(group: str, text: str) -> ConfigError:
    """Return the error for `+GROUP=NAME` of a group that has a choice already."""
    words = [word for word in sys.argv[1:] if re.match(rf"\+{re.escape(group)}=", word)]
    if not words:
        return ConfigError(f"{text.splitlines()[0]}; choose {group} once")
    return ConfigError(f"{group} already has a choice; write {words[0][1:]} without the +")


def _build_file_error(name: str, problem: str, key: str | None) -> ConfigError:
    """Return the error for a file of a config group, with its line."""
    if key is None:
        return ConfigError(f"{name}.yaml: {problem}")
    is_unknown = re.match(r"Key '[^']+' (?:not in|is not in struct)", problem)
    problem = str(build_unknown_key_error(key)) if is_unknown else f"{key}: {problem}"
    path, group = config_files.find_config_file(name), name.rpartition("/")[0]
    if path is None or not group or group.startswith("hydra"):
        return ConfigError(problem)
    written, line = config_files.find_key(path, key) or (key, None)
    groups = typing.get_type_hints(Config)
    is_for_root = group not in groups or (written != key and written.partition(".")[0] in groups)
    if is_for_root and config_files.find_package(path) is None:
        return _build_package_error(path, group)
    return ConfigError(f"{path}{'' if line is None else f', line {line}'}: {problem}")


def list_config_keys() -> list[str]:
    """Return every key of the configuration, groups included, such as `optimizer.beta2`."""
    return list(_iterate_keys(extend_schema(Config), ""))


def _iterate_keys(node: type, prefix: str) -> typing.Iterator[str]:
    for name, kind in typing.get_type_hints(node).items():
        yield prefix + name
        if dataclasses.is_dataclass(kind):
            yield from _iterate_keys(typing.cast(type, kind), f"{prefix}{name}.")


def _list_names(group: str) -> list[str]:
    """Return the names of the keys of a node, such as `data.sources.NAME`; empty if unknown."""
    node: typing.Any = extend_schema(Config)
    for part in re.split(r"[.\[]", group.replace("]", "")) if group else []:
        if dataclasses.is_dataclass(node):
            node = typing.get_type_hints(node).get(part)
        else:  # an entry of a mapping or list
            node = (typing.get_args(node) or (None,))[-1]
    return [*typing.get_type_hints(node)] if dataclasses.is_dataclass(node) else []


def build_unknown_key_error(key: str) -> ConfigError:
    """Return the error for an unknown key, with the closest valid one."""
    group, _, name = key.rpartition(".")
    names = _list_names(group)
    if group == _LAUNCHER_KEY:
        names = [known.rpartition(".")[2] for known in _list_launcher_keys()]
    if group in _OPTION_KEYS:
        return ConfigError(f"{key} is not a key of the configuration; write +{key}=VALUE")
    if group and names:
        matches = [f"{group}.{match}" for match in difflib.get_close_matches(name, names, n=1)]
        if group == _LAUNCHER_KEY and not matches:
            matches = [known for known in list_config_keys() if known.endswith(f".{name}")]
    else:
        matches = difflib.get_close_matches(key, list_config_keys(), n=1)
    problem = f"{key} is not a key of the configuration"
    if not group and list_choices(key):
        return ConfigError(f"{problem}; to choose one of its files, write +{key}=NAME")
    if not group and not matches:
        matches = [known for known in list_config_keys() if known.endswith(f".{key}")][:1]
    if matches == [key]:
        given = [word for word in sys.argv[1:] if word.startswith(f"{key}=")]
        added = f"+{given[0]}" if given else f"+{key}.NAME=VALUE"
        return ConfigError(f"{key} has no such entry; add one with {shlex.quote(added)}")
    if matches:
        return ConfigError(f"{problem}; did you mean {matches[0]}?")
    if names:
        return ConfigError(f"{problem}; {group or 'it'} has {', '.join(names)}")
    return ConfigError(f"{problem}; `--cfg job` prints all keys")


def _build_hydra_sweep_error(override: str) -> ConfigError:
    key = override.partition("=")[0]
    if key.startswith(f"{_LAUNCHER_KEY}.") and key not in _list_launcher_keys():
        return build_unknown_key_error(key)
    return ConfigError(
        f"{override} lists several values, but all points of a sweep have the same {key}; start "
        "one sweep per value"
    )


def _list_launcher_keys() -> list[str]:
    """Return the settings of the launcher on the command line, or of the default launcher."""
    chosen = [arg.partition("=")[2] for arg in sys.argv if arg.startswith("hydra/launcher=")]
    file, store = f"{[_DEFAULT_LAUNCHER, *chosen][-1]}.yaml", ConfigStore.instance()
    if file not in store.list("hydra/launcher"):
        return []
    names = map(str, store.load(f"hydra/launcher/{file}").node)
    return [f"{_LAUNCHER_KEY}.{name}" for name in names if name != "_target_"]


def _build_unknown_choice_error(group: str, choice: str, choices: Sequence[str]) -> ConfigError:
    if group == "hydra/launcher":
        choices = sorted(file.removesuffix(".yaml") for file in ConfigStore.instance().list(group))
    matches = [name for name in choices if name.startswith(f"{choice}_")]
    matches = matches or difflib.get_close_matches(choice, choices, n=1)
    hint = f" did you mean {matches[0]}?" if matches else ""
    listed = f" choices: {', '.join(choices)}" if choices else ""
    extension = "; one of an extension needs extensions=[FILE]" if group in CHOICE_SCHEMAS else ""
    return ConfigError(f"{group}={choice} does not exist;{hint}{listed}".rstrip(";") + extension)


def _parse_full_key(text: str) -> str | None:
    match = re.search(r"full_key: (\S+)", text)
    return match[1] if match else None


def _format_first_line(error: Exception) -> str:
    """Return the first line of an error about a value, after its key."""
    cause = error.__cause__ or error
    if (mark := getattr(cause, "problem_mark", None)) is not None:  # of a YAML file
        problem = getattr(cause, "problem", "invalid YAML")
        return f"{mark.name}, line {mark.line + 1}: {problem}"
    message = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
    key = _parse_full_key(str(cause)) or _parse_full_key(str(error))
    if override := re.match(r"Error merging override (\S+)", str(error)):
        return f"{override[1]}: {message}"
    return f"{key}: {message}" if key else message
