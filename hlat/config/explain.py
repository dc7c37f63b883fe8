"""Puts Hydra's and OmegaConf's errors into one sentence with the key and the nearest valid one.

Their own messages speak of structs and nodes; a user thinks in keys and choices.
"""

import dataclasses
import difflib
import re
import sys
import typing

from hydra.core.config_store import ConfigStore
from hydra.errors import OverrideParseException

from hlat.config.errors import ConfigError
from hlat.config.folders import folder
from hlat.config.run import Config

_LAUNCHER, _DEFAULT = "hydra.launcher", "local"


def explain(error: Exception) -> ConfigError:
    """Return the error as a ConfigError with the full key and what would work."""
    text = str(error)
    if isinstance(error, OverrideParseException):
        return ConfigError(f"{error.override}: {_first_line(error)}; write GROUP.KEY=VALUE")
    if match := re.search(r"Ambiguous value for argument '(.+)'", text):
        return ConfigError(f"{match[1]} lists several values; add -m for one run per value")
    if "Got NoneType" in text:
        return ConfigError("a group cannot be null; name one of its choices, such as model=tiny")
    if match := re.search(r"Could not override '([^'@]+)", text):
        return unknown_key(match[1])
    if match := re.search(r"Could not append to config\. An item is already at '([^']+)'", text):
        return ConfigError(f"{match[1]} already has a value; write {match[1]}=... without the +")
    if match := re.search(r"Could not find '([^']+)/([^']+)'", text):
        return _unknown_choice(match[1], match[2])
    if match := re.search(r"Key '([^']+)' (?:not in|is not in struct)", text):
        place = _full_key(text) or match[1]
        if place.rpartition(".")[2].partition("[")[0] != match[1] and match[1] not in place:
            return ConfigError(f"{place}: {match[1]} is not a key there")
        return unknown_key(place)
    return ConfigError(_first_line(error))


def keys() -> list[str]:
    """Return every key of the configuration, groups included, such as `optimizer.beta2`."""
    return list(_keys(Config, ""))


def _keys(node: type, prefix: str) -> typing.Iterator[str]:
    for name, kind in typing.get_type_hints(node).items():
        if name in {field.name for field in dataclasses.fields(node)}:
            yield prefix + name
            if dataclasses.is_dataclass(kind):
                yield from _keys(typing.cast(type, kind), f"{prefix}{name}.")


def unknown_key(key: str) -> ConfigError:
    """Return the error for a key that does not exist, with the nearest one that does."""
    group, _, name = key.rpartition(".")
    known_keys = _launcher_keys() if group == _LAUNCHER else keys()
    siblings = [known for known in known_keys if known.rpartition(".")[0] == group]
    names = [known.rpartition(".")[2] for known in siblings]
    if group and siblings:
        near = [f"{group}.{close}" for close in difflib.get_close_matches(name, names, n=1)]
    else:
        near = difflib.get_close_matches(key, keys(), n=1)
    problem = f"{key} is not a key of the configuration"
    if near:
        return ConfigError(f"{problem}; did you mean {near[0]}?")
    if siblings:
        return ConfigError(f"{problem}; {group or 'it'} has {', '.join(names)}")
    return ConfigError(f"{problem}; `--cfg job` prints all keys")


def _launcher_keys() -> list[str]:
    """The settings of the launcher that was typed, or of the default one."""
    typed = [word.partition("=")[2] for word in sys.argv if word.startswith("hydra/launcher=")]
    chosen, store = f"{[_DEFAULT, *typed][-1]}.yaml", ConfigStore.instance()
    if chosen not in store.list("hydra/launcher"):
        return []
    names = map(str, store.load(f"hydra/launcher/{chosen}").node)
    return [f"{_LAUNCHER}.{name}" for name in names if name != "_target_"]


def _unknown_choice(group: str, choice: str) -> ConfigError:
    choices = sorted(file.stem for file in (folder("conf") / group).glob("*.yaml"))
    if group == "sweep":
        choices = sorted(file.stem for file in folder("sweeps").glob("*.yaml"))
    if group == "hydra/launcher":
        found = ConfigStore.instance().list(group)
        choices = sorted(name.removesuffix(".yaml") for name in found)
    near = difflib.get_close_matches(choice, choices, n=1)
    hint = f" did you mean {near[0]}?" if near else ""
    listed = f" choices: {', '.join(choices)}" if choices else ""
    return ConfigError(f"{group}={choice} does not exist;{hint}{listed}".rstrip(";"))


def _full_key(text: str) -> str | None:
    match = re.search(r"full_key: (\S+)", text)
    return match[1] if match else None


def _first_line(error: Exception) -> str:
    """One line of an error about a value, with its key in front."""
    cause = error.__cause__ or error
    message = str(cause).strip().splitlines()[0]
    key = _full_key(str(cause)) or _full_key(str(error))
    if override := re.match(r"Error merging override (\S+)", str(error)):
        return f"{override[1]}: {message}"
    return f"{key}: {message}" if key else message
