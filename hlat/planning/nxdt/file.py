"""A configuration of NeuronX Distributed Training as flat, plain data.

A key is found by its full name, an interpolation that names another key stands for that key's
value, and nothing is ever computed: what a resolver would make of the rest is not known here.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hlat.config.errors import ConfigError

MODEL_CONFIG = "config.json:"
"""What the keys of the file that model.model_config names begin with."""

SOURCES = ("hf", "megatron")
"""Values of model_source, by which NxDT picks a model."""

_LOOK_UP = re.compile(r"\$\{(\.*)([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\}")
_LONGEST_CHAIN = 10


@dataclass(frozen=True)
class Unresolved:
    """A value that is to be given, or has an interpolation in it that is no plain look-up.

    Attributes:
        text: The value as it stands in the file.
    """

    text: Any


@dataclass(frozen=True)
class File:
    """The leaves of a configuration by full key, such as `model.optim.lr`; a list is a leaf.

    Attributes:
        leaves: Their values; `Unresolved` where the value is not known.
        absent: What NxDT takes for keys that the file does not have and that count.
    """

    leaves: Mapping[str, Any]
    absent: Mapping[str, Any] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or the default where it is absent or not known."""
        value = self.leaves.get(key, self.absent.get(key, default))
        return default if isinstance(value, Unresolved) else value

    @property
    def hf(self) -> bool:
        """Whether the model is one of Hugging Face's, and not Megatron's."""
        return bool(self.leaves["model_source"] == "hf")


def read(tree: Any, model_config: Mapping[str, Any] | None = None) -> File:
    """Return the file that the plain data of a YAML stand for.

    Args:
        tree: Dictionaries, lists and scalars, interpolations as they were written.
        model_config: Those of the file that model.model_config names; None: it is not there.

    Raises:
        ConfigError: NxDT could not tell what kind of model this is.
    """
    found = tree if isinstance(tree, Mapping) else {}
    source = _value(found.get("model_source"), found, ())
    if source not in SOURCES:
        raise ConfigError(
            f"is no configuration of NxDT: it has no model_source that is {' or '.join(SOURCES)}"
        )
    leaves = {".".join(path): _value(value, found, path[:-1]) for path, value in _leaves(found, ())}
    for key, value in (model_config or {}).items():
        leaves[f"{MODEL_CONFIG}{key}"] = value
    return File(leaves)


def _leaves(
    tree: Mapping[Any, Any], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in tree.items():
        plain = isinstance(key, str) and "." not in key
        here = (*path, key if plain else f"[{key!r}]")
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, here)
        else:
            yield here, value


def _value(value: Any, tree: Mapping[Any, Any], section: tuple[str, ...], followed: int = 0) -> Any:
    """Return what a value stands for.

    Args:
        value: As it was written.
        tree: The whole configuration.
        section: Path of the section that it stands in, which `${.key}` starts from.
        followed: Look-ups that led here.
    """
    if isinstance(value, list):
        items = [_value(item, tree, section, followed) for item in value]
        return Unresolved(value) if any(isinstance(item, Unresolved) for item in items) else items
    if isinstance(value, Mapping):
        return Unresolved(value) if "${" in str(value) else value
    if value == "???":
        return Unresolved(value)
    if not isinstance(value, str) or "${" not in value:
        return value
    match = _LOOK_UP.fullmatch(value)
    if match is None or followed == _LONGEST_CHAIN:
        return Unresolved(value)
    up, names = len(match[1]), tuple(match[2].split("."))
    path = (*section[: len(section) + 1 - up], *names) if up else names
    if up > len(section) + 1 or (target := _select(tree, path)) is None:
        return Unresolved(value)
    found = _value(target, tree, path[:-1], followed + 1)
    return Unresolved(value) if isinstance(found, Unresolved) else found


def _select(tree: Mapping[Any, Any], path: tuple[str, ...]) -> Any:
    """Return the scalar or list at a path; None where there is none."""
    node: Any = tree
    for name in path:
        node = node.get(name) if isinstance(node, Mapping) else None
    return None if isinstance(node, Mapping) else node
