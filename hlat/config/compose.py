"""Makes the schema, the sweeps and the launchers known to Hydra, however hlat is installed.

Hydra 1.3 finds launcher plugins by listing the namespace package `hydra_plugins`; an editable
install cannot be listed and a plain checkout has none, so the classes are also registered by hand
(docs/adr/0005-packaging.md). The copy of the program that a job runs has none: a job sends nothing.
"""

import importlib
import importlib.util
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hlat.config import hydra_section
from hlat.config.errors import ConfigError
from hlat.config.explain import explain
from hlat.config.folders import copy, folder
from hlat.config.model import Model
from hlat.config.run import Config

HERE = ("local", "basic")
"""Launchers that run things here and now, as a single run does without them."""
_LAUNCHERS = "hydra_plugins.hlat_launchers"


def register() -> None:
    """Register the schema, the sweeps and the launchers with Hydra, and check what it composes."""
    hydra_section.install()
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for study in sorted(folder("sweeps").glob("*.yaml")):
        store.store(group="sweep", name=study.stem, node=OmegaConf.load(study), package="_global_")
    if copy() is None:
        _register_launchers()


def composed(overrides: Sequence[str], with_hydra: bool = False) -> DictConfig:
    """Return the configuration that hlat.train composes from overrides.

    Args:
        overrides: Of it.
        with_hydra: Whether Hydra's own section is in it.

    Raises:
        ConfigError: One of them is not a key, a choice or a value that the schema has.
    """
    register()
    words = [*overrides] if copy() is None else ["hydra/launcher=basic", *overrides]
    try:
        with initialize_config_dir(config_dir=str(folder("conf")), version_base="1.3"):
            return compose("config", words, return_hydra_config=with_hydra)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise explain(error) from error


def models() -> dict[str, dict[str, Any]]:
    """Return the choices of the model group, each with all fields of the model."""
    found = {}
    for choice in sorted((folder("conf") / "model").glob("*.yaml")):
        text = OmegaConf.load(choice)
        model = OmegaConf.merge(Model, OmegaConf.select(text, "model", default=text))
        plain = OmegaConf.to_container(model, enum_to_str=True)
        assert isinstance(plain, dict)
        found[choice.stem] = {str(key): value for key, value in plain.items()}
    return found


def launcher(words: Sequence[str]) -> tuple[Any, Path] | None:
    """Return the launcher that words choose, and the folder of what it sends; None: run it here.

    For entries that take few of the configuration's keys, and that Hydra does not call.

    Args:
        words: As `hydra/launcher=slurm` and `hydra.launcher.partition=x`.

    Raises:
        ConfigError: There is no such launcher or setting.
    """
    section = composed(words, with_hydra=True).hydra
    if (chosen := section.runtime.choices["hydra/launcher"]) in HERE:
        if others := [word for word in words if not word.startswith("hydra/launcher=")]:
            raise ConfigError(f"hydra/launcher={chosen} has no use for {', '.join(others)} here")
        return None
    settings: Any = OmegaConf.to_container(section.launcher, resolve=True)
    kind = Plugins.instance().class_name_to_class[settings.pop("_target_")]
    return kind(**settings), Path(section.sweep.dir)


def launcher_module(name: str) -> ModuleType:
    """Return a module of launchers/, which has another name in an installed wheel."""
    register()
    return importlib.import_module(f"{_LAUNCHERS}.{name}")


def _register_launchers() -> None:
    plugins = (
        Plugins.instance()
    )  # its scan comes first, so that nothing is executed twice afterwards
    for launcher in (sys.modules.get(_LAUNCHERS) or _launchers()).PLUGINS:
        if f"{launcher.__module__}.{launcher.__name__}" not in plugins.class_name_to_class:
            plugins.register(launcher)


def _launchers() -> ModuleType:
    try:
        return importlib.import_module(_LAUNCHERS)
    except ModuleNotFoundError as missing:
        if missing.name not in ("hydra_plugins", _LAUNCHERS):
            raise
    return _launchers_of_checkout()


def _launchers_of_checkout() -> ModuleType:
    source = folder("conf").parent / "launchers"
    spec = importlib.util.spec_from_file_location(
        _LAUNCHERS, source / "__init__.py", submodule_search_locations=[str(source)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_LAUNCHERS] = module
    spec.loader.exec_module(module)
    vars(_namespace())["hlat_launchers"] = module
    return module


def _namespace() -> ModuleType:
    try:
        return importlib.import_module("hydra_plugins")
    except ModuleNotFoundError:  # no plugin package is installed at all
        namespace = sys.modules["hydra_plugins"] = types.ModuleType("hydra_plugins")
        namespace.__path__ = []
        return namespace
