"""Registration of schema and sweeps with Hydra, and composition of configurations."""

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import JobRuntime
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hlat.config import config_loader, launcher_plugins, redaction
from hlat.config.components import (
    CHOICE_SCHEMAS,
    Component,
    create_schema_node,
    extend_schema,
    list_components,
)
from hlat.config.config_errors import ConfigError
from hlat.config.config_files import list_user_config_dirs
from hlat.config.hydra_errors import convert_hydra_error
from hlat.config.local_hardware import choose_local_hardware
from hlat.config.model import ModelConfig
from hlat.config.package_dirs import find_code_snapshot, find_package_dir
from hlat.config.run import Config

LOCAL_LAUNCHERS = ("local", "basic")
"""Launchers that run jobs on this machine."""
_registered: list[Any] = []
"""Hardware of this machine, and settings of the components, in the registered schema."""


def register_configs() -> None:
    """Register schema and sweeps with Hydra; install the safe loader and resolver."""
    config_loader.install_safe_config_loader()
    redaction.install_resolver()
    registered = [choose_local_hardware(), *map(_get_settings, list_components())]
    if registered != _registered:
        _register_schema()
        config_loader.forget_compositions()
        _registered[:] = registered
    if find_code_snapshot() is None:
        launcher_plugins.register_local_settings()


def compose_config(overrides: Sequence[str], return_hydra_config: bool = False) -> DictConfig:
    """Return the configuration of hlat.train with overrides in Hydra's grammar.

    As in hlat.train, directories of `--config-dir` are searched too.

    Raises:
        ConfigError: An override has an invalid key, choice or value, or a directory is missing.
    """
    (config,) = compose_points([overrides], return_hydra_config)
    if isinstance(config, ConfigError):
        raise config
    return config


def compose_points(
    points: Sequence[Sequence[str]], return_hydra_config: bool = False
) -> list[DictConfig | ConfigError]:
    """Return the configuration of each point of a sweep, or the error of its overrides.

    Points with the same choices of groups share a composition, which is most of the time.
    """
    register_configs()
    first = [] if find_code_snapshot() is None else ["hydra/launcher=basic"]
    composed: list[DictConfig | ConfigError] = []
    try:
        with initialize_config_dir(config_dir=str(find_package_dir("conf")), version_base="1.3"):
            if directories := _resolve_user_config_dirs():
                loader = GlobalHydra.instance().config_loader()
                assert isinstance(loader, config_loader.SafeConfigLoader)
                loader.add_config_dirs(directories)
            for overrides in points:
                try:
                    words = [*first, *overrides]
                    composed.append(compose("config", words, return_hydra_config))
                except (HydraException, OmegaConfBaseException, ValueError) as error:
                    composed.append(convert_hydra_error(error))
    except ConfigError:
        raise
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise convert_hydra_error(error) from error
    return composed


def compose_ahead(points: Sequence[Sequence[str]]) -> None:
    """Compose configurations of `hlat.train` that later compositions in this process copy.

    Errors are those of the later compositions.
    """
    JobRuntime.instance().set("name", "train")  # a part of the configuration
    with suppress(ConfigError):
        compose_points(points)


def _resolve_user_config_dirs() -> list[Path]:
    directories = [directory.absolute() for directory in list_user_config_dirs()]
    if missing := [str(directory) for directory in directories if not directory.is_dir()]:
        raise ConfigError(f"--config-dir: {', '.join(missing)} is not a directory")
    return directories


def load_model_presets() -> dict[str, dict[str, Any]]:
    """Return the choices of the model group by name, each with all fields."""
    presets = {}
    for file in sorted((find_package_dir("conf") / "model").glob("*.yaml")):
        content = OmegaConf.load(file)
        model = OmegaConf.merge(ModelConfig, OmegaConf.select(content, "model", default=content))
        fields = OmegaConf.to_container(model, enum_to_str=True)
        assert isinstance(fields, dict)
        presets[file.stem] = {str(key): value for key, value in fields.items()}
    return presets


def instantiate_launcher(overrides: Sequence[str]) -> tuple[Any, Path] | None:
    """Return the chosen launcher and its sweep directory, or None to run on this machine.

    Entry points that Hydra does not call use it, with overrides such as `hydra/launcher=slurm` and
    `hydra.launcher.partition=x`.

    Raises:
        ConfigError: Unknown launcher or setting.
    """
    section = compose_config(overrides, return_hydra_config=True).hydra
    if (chosen := section.runtime.choices["hydra/launcher"]) in LOCAL_LAUNCHERS:
        if unused := [arg for arg in overrides if not arg.startswith("hydra/launcher=")]:
            raise ConfigError(f"hydra/launcher={chosen} does not use {', '.join(unused)} here")
        return None
    settings: Any = OmegaConf.to_container(section.launcher, resolve=True)
    launcher = Plugins.instance().class_name_to_class[settings.pop("_target_")]
    return launcher(**settings), Path(section.sweep.dir)


def import_launcher_module(name: str) -> ModuleType:
    """Return a module of launchers/ by its name relative to that package."""
    register_configs()
    return launcher_plugins.import_launcher_module(name)


@dataclasses.dataclass
class _SchemaNode(ConfigNode):
    """Schema that is created for each composition, which changes it."""

    schema: type
    """Dataclass of the configuration."""

    def __copy__(self) -> ConfigNode:
        node: Any = _NewNode(create_schema_node(self.schema))
        return ConfigNode(self.name, node, self.group, self.package, self.provider)


@dataclasses.dataclass
class _NewNode:
    """Configuration that nothing else refers to, so that Hydra's copy of it is itself."""

    config: DictConfig
    """Configuration of the schema."""

    def __deepcopy__(self, memo: dict[int, Any]) -> DictConfig:
        return self.config


@dataclasses.dataclass
class _StudyNode(ConfigNode):
    """Configuration of a study, of which Hydra makes a copy when it is selected."""

    file: Path
    """File in sweeps/, which is read then."""

    def __copy__(self) -> ConfigNode:
        study = OmegaConf.load(self.file)
        assert isinstance(study, DictConfig)
        return ConfigNode(self.name, study, self.group, self.package, self.provider)


def _get_settings(component: Component) -> tuple[Any, ...]:
    return component.section, component.kind, component.settings, component.spec


def _register_schema() -> None:
    store = ConfigStore.instance()
    empty, schema = OmegaConf.create(), extend_schema(Config)
    store.repo["schema.yaml"] = _SchemaNode("schema.yaml", empty, None, None, None, schema)
    detected = {"defaults": [choose_local_hardware(), "_self_"], "processes_per_node": None}
    store.store(group="hardware", name="local", node=detected)
    for choice in (one for group in CHOICE_SCHEMAS for one in list_components(group)):
        node = dataclasses.replace(choice.spec, name=choice.kind)
        store.store(group=choice.section, name=choice.kind, node=node)
    for study in sorted(find_package_dir("sweeps").glob("*.yaml")):
        node = _StudyNode(study.name, empty, "sweep", "_global_", None, study)
        store.repo.setdefault("sweep", {})[study.name] = node
