"""Makes the schema, the sweeps and the launchers known to Hydra, however hlat is installed.

Hydra 1.3 finds launcher plugins by listing the namespace package `hydra_plugins`; an editable
install cannot be listed and a plain checkout has none, so the classes are also registered by hand
(docs/adr/0005-packaging.md).
"""

import importlib
import importlib.util
import sys
import types
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hlat.config import hydra_section
from hlat.config.explain import explain
from hlat.config.folders import folder
from hlat.config.model import Model
from hlat.config.run import Config

_LAUNCHERS = "hydra_plugins.hlat_launchers"


def register() -> None:
    """Register the schema, the sweeps and the launchers with Hydra, and check what it composes."""
    hydra_section.install()
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for study in sorted(folder("sweeps").glob("*.yaml")):
        store.store(group="sweep", name=study.stem, node=OmegaConf.load(study), package="_global_")
    _register_launchers()


def composed(overrides: Sequence[str]) -> DictConfig:
    """Return the configuration that hlat.train composes from overrides.

    Raises:
        ConfigError: One of them is not a key, a choice or a value that the schema has.
    """
    register()
    try:
        with initialize_config_dir(config_dir=str(folder("conf")), version_base="1.3"):
            return compose("config", list(overrides))
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
