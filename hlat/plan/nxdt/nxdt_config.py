"""Configuration of NeuronX Distributed Training as a flat mapping.

Interpolations that name another key are replaced by its value; other resolvers are not evaluated.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hlat.config.config_errors import ConfigError

MODEL_CONFIG_PREFIX = "config.json:"
"""Prefix of the keys of the file in model.model_config."""

MODEL_SOURCES = ("hf", "megatron")
"""Values of model_source, by which NxDT selects a model."""

_INTERPOLATION = re.compile(r"\$\{(\.*)([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\}")
_MAX_INTERPOLATION_DEPTH = 10


@dataclass(frozen=True)
class UnresolvedValue:
    """Missing value, or one with an interpolation that is not a plain key, as in the file."""

    text: Any


@dataclass(frozen=True)
class NxdtConfig:
    """Leaves of a configuration by full key, such as `model.optim.lr`; a list is a leaf.

    Attributes:
        settings: Values by key; `UnresolvedValue` where unknown.
        defaults: NxDT's defaults of relevant keys that the file does not contain.
    """

    settings: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or `default` if it is absent or unresolved."""
        value = self.settings.get(key, self.defaults.get(key, default))
        return default if isinstance(value, UnresolvedValue) else value

    @property
    def is_hf(self) -> bool:
        """True for Hugging Face models, False for Megatron's."""
        return bool(self.settings["model_source"] == "hf")

    @property
    def has_model_config(self) -> bool:
        """True if the settings include those of the file in model.model_config."""
        return any(key.startswith(MODEL_CONFIG_PREFIX) for key in self.settings)


def parse_nxdt_config(tree: Any, model_config: Mapping[str, Any] | None = None) -> NxdtConfig:
    """Return the flat configuration of a YAML tree with unresolved interpolations.

    `model_config` is the content of the file in model.model_config; None if unavailable.

    Raises:
        ConfigError: If the tree has no valid model_source.
    """
    root = tree if isinstance(tree, Mapping) else {}
    if _resolve_value(root.get("model_source"), root, ()) not in MODEL_SOURCES:
        raise ConfigError(
            "is not a configuration of NxDT: it has no model_source that is "
            f"{' or '.join(MODEL_SOURCES)}"
        )
    settings = {
        ".".join(path): _resolve_value(value, root, path[:-1])
        for path, value in _iter_leaves(root, ())
    }
    sizes = {f"{MODEL_CONFIG_PREFIX}{key}": value for key, value in (model_config or {}).items()}
    return NxdtConfig(settings | sizes)


def _iter_leaves(
    tree: Mapping[Any, Any], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in tree.items():
        is_plain = isinstance(key, str) and "." not in key
        key_path = (*path, key if is_plain else f"[{key!r}]")
        if isinstance(value, Mapping) and value:
            yield from _iter_leaves(value, key_path)
        else:
            yield key_path, value


def _resolve_value(
    value: Any, tree: Mapping[Any, Any], section: tuple[str, ...], depth: int = 0
) -> Any:
    """Return a value with its interpolations replaced, of which `${.key}` is relative to a section.

    `depth` is the number of interpolations followed so far.
    """
    if isinstance(value, list):
        items = [_resolve_value(item, tree, section, depth) for item in value]
        is_unresolved = any(isinstance(item, UnresolvedValue) for item in items)
        return UnresolvedValue(value) if is_unresolved else items
    if isinstance(value, Mapping):
        return UnresolvedValue(value) if "${" in str(value) else value
    if not isinstance(value, str) or ("${" not in value and value != "???"):
        return value
    match = _INTERPOLATION.fullmatch(value)
    if match is None or depth == _MAX_INTERPOLATION_DEPTH:
        return UnresolvedValue(value)
    num_dots, names = len(match[1]), tuple(match[2].split("."))
    path = (*section[: len(section) + 1 - num_dots], *names) if num_dots else names
    target = None if num_dots > len(section) + 1 else _select_path(tree, path)
    resolved = None if target is None else _resolve_value(target, tree, path[:-1], depth + 1)
    return UnresolvedValue(value) if isinstance(resolved, UnresolvedValue | None) else resolved


def _select_path(tree: Mapping[Any, Any], path: tuple[str, ...]) -> Any:
    """Return the scalar or list at a path; None if there is none."""
    node: Any = tree
    for name in path:
        node = node.get(name) if isinstance(node, Mapping) else None
    return None if isinstance(node, Mapping) else node
