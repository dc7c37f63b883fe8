"""Former keys of the configuration.

The next version rejects them on the command line and in YAML files of the user. Records, which are
config.yaml of a run, state.json of a checkpoint and the index of runs, may always have them.
"""

import functools
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

_PRECISION_KEYS = {
    "weights": "param_dtype",
    "compute": "compute_dtype",
    "gradients": "grad_dtype",
    "accumulation": "grad_accum_dtype",
    "reduction": "reduce_dtype",
    "optimizer_state": "optimizer_state_dtype",
    "master_weights": "master_weight_dtype",
    "copies_drift": "allow_replica_divergence",
}
RENAMED_KEYS = {
    "compiler.inductor": "compiler.torch_compile",
    **{f"precision.{key}": f"precision.{now}" for key, now in _PRECISION_KEYS.items()},
}
"""Present key of each former key, in the same section."""
_MAPPINGS_BY_KEY = ("hydra.sweeper.params", "study.baseline")
"""Mappings whose entries are full keys of the configuration."""


def rename_override(override: str) -> str:
    """Return an override with the present name of its key, and print a warning for a former one."""
    key, separator, value = override.partition("=")
    name = key.lstrip("+~")
    if name not in RENAMED_KEYS:
        return override
    warn_of_former_names([name])
    return f"{key.removesuffix(name)}{RENAMED_KEYS[name]}{separator}{value}"


def rename_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by full key with present keys."""
    return {RENAMED_KEYS.get(key, key): value for key, value in settings.items()}


def restore_former_keys(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by full key with the former keys, of which digests in run names consist."""
    former = {now: key for key, now in RENAMED_KEYS.items()}
    return {former.get(key, key): value for key, value in settings.items()}


def rename_config(config: Any, package: str = "") -> tuple[Any, list[str]]:
    """Return the contents of a YAML file with present keys, and the former keys that it has.

    `package` is the key of the configuration at which the contents are placed.
    """
    if not isinstance(config, DictConfig):
        return config, []
    tree = OmegaConf.to_container(config)
    former = rename_tree(tree, package)
    return (OmegaConf.create(tree) if former else config), former


def rename_tree(tree: Any, package: str = "") -> list[str]:
    """Replace the former keys of nested dictionaries by present ones, and return the former keys.

    Of a former and a present key, the value of the present one is used.
    """
    found = []
    for key, now in RENAMED_KEYS.items():
        section, _, name = key.rpartition(".")
        places = [(_find_node(tree, section, package), name, now.rpartition(".")[2])]
        places += [(_find_node(tree, mapping, package), key, now) for mapping in _MAPPINGS_BY_KEY]
        for node, before, after in places:
            if isinstance(node, dict) and before in node:
                node.setdefault(after, node.pop(before))
                found.append(key)
    return found


def warn_of_former_names(keys: Iterable[str]) -> None:
    """Print a warning for each of several former keys."""
    for key in keys:
        print_once(f"hlat: {key} is now {RENAMED_KEYS[key]}; the next version rejects {key}")


@functools.cache
def print_once(message: str) -> None:
    """Print a message for the first of several compositions."""
    print(message, file=sys.stderr)


def _find_node(tree: Any, key: str, package: str) -> Any:
    """Return the node at a full key in a tree that is placed at `package`; None if it has none."""
    if package:
        if not f"{key}.".startswith(f"{package}."):
            return None
        key = key[len(package) + 1 :]
    for name in key.split(".") if key else ():
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree
