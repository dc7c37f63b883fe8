"""Import of Hydra's launcher plugins, when a configuration selects one.

Hydra 1.3 finds launcher plugins by listing the namespace package `hydra_plugins`. An editable
install cannot be listed and a plain checkout has no such package, so the launchers are also
registered explicitly (docs/adr/0005-packaging.md). A code snapshot has no launchers, as a job
submits no jobs. Their import takes as long as a composition, so it waits for their first use.
"""

import importlib
import importlib.util
import sys
import types
from types import ModuleType

from hydra.core.plugins import Plugins

from hlat.config.package_dirs import find_code_snapshot, find_package_dir

_PACKAGE = "hydra_plugins.hlat_launchers"


def register_local_settings() -> None:
    """Register the settings of the default launcher, which each configuration contains."""
    import_launcher_module("local._local_settings")


def register_launchers() -> None:
    """Register all launchers with their settings."""
    if find_code_snapshot() is not None:
        return
    plugins = Plugins.instance()  # Hydra scans first, so that no module is executed twice
    for launcher in import_launcher_module("_plugins").PLUGINS:
        if f"{launcher.__module__}.{launcher.__name__}" not in plugins.class_name_to_class:
            plugins.register(launcher)


def import_launcher_module(name: str) -> ModuleType:
    """Return a module of launchers/ by its name relative to that package."""
    try:
        return importlib.import_module(f"{_PACKAGE}.{name}")
    except ModuleNotFoundError as missing:
        if missing.name not in ("hydra_plugins", _PACKAGE):
            raise
    _import_package_from_checkout()
    return importlib.import_module(f"{_PACKAGE}.{name}")


def _import_package_from_checkout() -> None:
    source = find_package_dir("conf").parent / "launchers" / "__init__.py"
    spec = importlib.util.spec_from_file_location(_PACKAGE, source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    vars(_import_hydra_plugins())["hlat_launchers"] = module
    sys.modules[_PACKAGE] = module
    spec.loader.exec_module(module)


def _import_hydra_plugins() -> ModuleType:
    try:
        return importlib.import_module("hydra_plugins")
    except ModuleNotFoundError:  # no plugin package is installed
        namespace = sys.modules["hydra_plugins"] = types.ModuleType("hydra_plugins")
        namespace.__path__ = []
        return namespace
