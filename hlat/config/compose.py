"""Makes the schema, the sweeps and the launchers known to Hydra, however hlat is installed.

Hydra 1.3 finds launcher plugins by listing the namespace package `hydra_plugins`; an editable
install cannot be listed and a plain checkout has none, so the classes are also registered by hand
(docs/adr/0005-packaging.md).
"""

import importlib
import importlib.util
import sys
import types
from types import ModuleType

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

from hlat.config import hydra_section
from hlat.config.folders import folder
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
