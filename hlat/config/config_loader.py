"""Hydra's configuration loader with checks, and with one composition for all points of a sweep."""

import copy
import dataclasses
import os
import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from hydra._internal import defaults_list as hydra_defaults_list
from hydra._internal import hydra as hydra_internal
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.config_repository import ConfigRepository
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.default_element import InputDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobRuntime
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.sweeper import Sweeper
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from hlat.config import extensions, launcher_plugins, yaml_loader
from hlat.config.components import list_group_choices
from hlat.config.config_copies import CopiedConfig
from hlat.config.config_errors import ConfigError, raise_config_errors
from hlat.config.data_domains import add_domains, clear_domains
from hlat.config.hydra_config_security import find_code_references, validate_search_path
from hlat.config.lr_grid import add_lr_axis
from hlat.config.merge_speed import defer_parents, omit_node_copies
from hlat.config.optimizer import RENAMED_PRESETS
from hlat.config.override_keys import list_replaced_axes
from hlat.config.package_dirs import find_package_dir
from hlat.config.relative_schedule import apply_run_length
from hlat.config.renamed_keys import (
    print_once,
    rename_config,
    rename_override,
    warn_of_former_names,
)

_MAX_COMPOSED = 64
"""Number of configurations in memory, one per combination of choices."""
_composed_package_files: dict[tuple[str | None, ...], CopiedConfig] = {}
"""Configurations from files of the package, which do not change while a process runs."""
_RENAMED_CHOICES = {
    "experiment/desk": "experiment/small_study",
    "recovery/desk": "recovery/interactive",
    **{f"optimizer/{before}": f"optimizer/{now}" for before, now in RENAMED_PRESETS.items()},
}
"""Former files of conf/ that overrides and files may name until the next version."""
_RENAMED_MODEL = re.compile(r"^(model/\w+)_desk$")
"""Former files of the smallest model of each family."""
_SINGLE_PATH = re.compile(r"(\+{0,2}data\.sources\.[^.=]+\.(?:heldout_)?paths)=([^\[,$~]+)")
"""Override of the paths of a source with one path instead of a list."""
_PLUGIN_GROUPS = ("hydra/launcher", "hydra/sweeper")
"""Groups whose choices are launchers/ and plugins of Hydra."""
_DEFAULT_PLUGINS = ("local", "basic")
"""Choices of these groups without which no configuration is composed."""
_create_map = hydra_defaults_list._create_interpolation_map
_EMPTY_MAPPING = re.compile(r"[\w./@-]+=\{\s*\}")
_compose_batch = Sweeper.validate_batch_is_legal


def forget_compositions() -> None:
    """Compose again, after other settings were registered."""
    _composed_package_files.clear()


def install_safe_config_loader() -> None:
    """Replace Hydra's configuration loader in this process; Hydra has no hook for it.

    Hydra's sweeper no longer composes all points before a launcher that does so itself.
    """
    yaml_loader.install_c_yaml()
    namespace = vars(hydra_internal)
    assert namespace["ConfigLoaderImpl"] in (ConfigLoaderImpl, SafeConfigLoader)
    namespace["ConfigLoaderImpl"] = SafeConfigLoader
    vars(hydra_defaults_list)["_create_interpolation_map"] = _create_interpolation_map
    setattr(Sweeper, "validate_batch_is_legal", _validate_batch)  # noqa: B010 (for mypy)


def _validate_batch(sweeper: Sweeper, batch: Sequence[Sequence[str]]) -> None:
    """Compose all points, unless the launcher composes them before it starts the first."""
    if not getattr(getattr(sweeper, "launcher", None), "validates_points", False):
        _compose_batch(sweeper, batch)


class SafeConfigLoader(ConfigLoaderImpl):
    """Hydra's configuration loader with checks for references to code.

    Raises:
        ConfigError: The search path contains a package, which Hydra would import, or a directory
            with a choice that conf/ has, which Hydra would ignore.
    """

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        validate_search_path(config_search_path)
        _refuse_hidden_choices(config_search_path)
        super().__init__(config_search_path)
        self.repository = _ConfigRepository(config_search_path)
        has_user_dirs = bool(_list_user_dirs(config_search_path))
        self._composed = {} if has_user_dirs else _composed_package_files
        self._groups: dict[str, bool] = {}
        self._sweep_values: list[Override] | None = None

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """Compose the configuration; one path of a source is read as a list of one.

        Raises:
            ConfigError: The configuration names code that Hydra would run, or an override is an
                empty mapping, which has no effect.
        """
        overrides = [rename_override(override) for override in overrides]
        raise_config_errors(
            f"{override} has no effect, since mappings are merged; remove an entry with "
            f"~{override.partition('=')[0]}.NAME"
            for override in overrides
            if _EMPTY_MAPPING.fullmatch(override)
        )
        overrides = [
            _SINGLE_PATH.sub(r"\1=[\2]", word) if _SINGLE_PATH.fullmatch(word) else word
            for word in overrides
        ]
        config = self._compose(
            config_name, overrides, run_mode, from_shell, validate_sweep_overrides
        )
        raise_config_errors(find_code_references(config))
        clear_domains(config)
        apply_run_length(config, overrides)
        extensions.list_loaded(config.get(extensions.KEY) or ())
        if run_mode is RunMode.MULTIRUN and validate_sweep_overrides:
            from hlat.config.mixture_sampling import add_mixture_axis  # imports all validations

            launcher_plugins.register_launchers()
            parsed = OverridesParser.create().parse_overrides(overrides)
            swept = [o.key_or_group for o in parsed if o.is_sweep_override()]
            add_lr_axis(config, swept)
            add_mixture_axis(config, swept)
            axes = config.hydra.sweeper.get("params") or {}
            for message in list_replaced_axes(axes, overrides):
                print_once(message)
        return config

    def add_config_dirs(self, directories: Sequence[Path]) -> None:
        """Also search `directories` for choices, as --config-dir of hydra.main."""
        for directory in reversed(directories):
            self.config_search_path.prepend(
                "command-line", f"file://{directory}", SearchPathQuery(provider="schema")
            )
        _refuse_hidden_choices(self.config_search_path)
        self.repository.initialize_sources(self.config_search_path)
        self._composed = {}

    def _compose(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool,
        validate_sweep_overrides: bool,
    ) -> DictConfig:
        """Compose the configuration of a run from a copy of the one with the same choices."""
        parsed = OverridesParser.create().parse_overrides(overrides)
        self._validate_choices(parsed)
        # Hydra adds its mode when it composes a run again
        hydra = [o for o in parsed if o.is_hydra_override() and o.key_or_group != "hydra.mode"]
        values = [o for o in parsed if not (o in hydra or self._may_be_group(o))]
        # Hydra composes a run twice, at first without this validation for the value of hydra.mode
        is_sweep = any(override.is_sweep_override() for override in parsed)
        if run_mode is RunMode.RUN or not (validate_sweep_overrides or is_sweep):
            if validate_sweep_overrides:
                self.validate_sweep_overrides_legal(parsed, run_mode, from_shell)
            choices = [str(o.input_line) for o in parsed if o not in values]
            config = self._load_choices(config_name, choices)
            add_domains(config, values)
            _apply_values(config, values, parsed)
        else:
            self._sweep_values = values
            try:
                config = super().load_configuration(
                    config_name, overrides, run_mode, from_shell, validate_sweep_overrides
                )
            finally:
                self._sweep_values = None
        return config

    def _compose_config_from_defaults_list(self, defaults: Any, repo: Any) -> DictConfig:
        """Compose the files, and add the domains of a sweep before Hydra applies its values."""
        names = [default.config_path for default in defaults]
        is_used_once = len({*names}) == len(names)  # Hydra loads each file once
        with defer_parents(), omit_node_copies() if is_used_once else nullcontext():
            config = super()._compose_config_from_defaults_list(defaults, repo)
        config._re_parent()
        if self._sweep_values is not None:
            add_domains(config, self._sweep_values)
        return config

    def _load_choices(self, config_name: str | None, overrides: list[str]) -> DictConfig:
        """Return the configuration without values of the command line.

        All compositions of a process with the same choices copy it, such as the points of a sweep:
        composition takes thirty times as long as a copy.
        """
        paths = (entry.path for entry in self.config_search_path.get_path())
        key = (config_name, JobRuntime.instance().get("name"), *overrides, *paths)
        if key not in self._composed:
            if len(self._composed) == _MAX_COMPOSED:
                self._composed.clear()
            composed = super().load_configuration(config_name, overrides, RunMode.RUN)
            self._composed[key] = CopiedConfig(composed)
            config = composed
        else:
            config = self._composed[key].copy()
        config.hydra.runtime.cwd = os.getcwd()
        return config

    def _validate_choices(self, overrides: list[Override]) -> None:
        """Raise ConfigError if a list for a group has elements other than names of its files."""
        for override in overrides:
            values = override.value() if self._may_be_group(override) else None
            if isinstance(values, list) and not all(isinstance(name, str) for name in values):
                group = override.key_or_group
                choices = ", ".join(list_group_choices(group))
                raise ConfigError(f"{override.input_line}: {group} selects one of {choices}")

    def _may_be_group(self, override: Override) -> bool:
        """Return True if an override selects a file, or is not a value of a key."""
        key = override.key_or_group
        if key not in self._groups:
            try:
                self._groups[key] = self.repository.group_exists(key)
            except OSError:  # the key is too long for a file name
                self._groups[key] = False
        return self._groups[key] or override.package is not None

    def _process_config_searchpath(
        self, config_name: str | None, parsed_overrides: list[Override], repo: Any
    ) -> None:
        """Raise ConfigError if overrides or the primary configuration set hydra.searchpath."""
        loaded = None if config_name is None else repo.load_config(config_path=config_name)
        keys = [override.key_or_group for override in parsed_overrides]
        if "hydra.searchpath" in keys or (
            loaded is not None and OmegaConf.select(loaded.config, "hydra.searchpath") is not None
        ):
            raise ConfigError(
                "hydra.searchpath can name Python packages, which Hydra would import, so hlat does "
                "not allow it; use --config-dir"
            )


class _ConfigRepository(ConfigRepository):
    """Hydra's repository of configuration files, which accepts former names of choices and keys."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_ConfigRepository":
        """Return a copy with the same sources, which refer to all registered configurations.

        Hydra copies the repository for each composition, so that it can replace the sources.
        """
        return copy.copy(self)

    def get_group_options(
        self, group_name: str, results_filter: ObjectType | None = ObjectType.CONFIG
    ) -> list[str]:
        if group_name in _PLUGIN_GROUPS:
            launcher_plugins.register_launchers()
        return super().get_group_options(group_name, results_filter)

    def load_config(self, config_path: str) -> ConfigResult | None:
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        if group in _PLUGIN_GROUPS and name not in _DEFAULT_PLUGINS:
            launcher_plugins.register_launchers()
        found = self._load_choice(config_path)
        if found is not None and found.path.startswith("file:"):
            package = found.header.get("package") or "_group_"
            group = config_path.rpartition("/")[0].replace("/", ".")
            package = {"_global_": "", "_group_": group}.get(package, package)
            found.config, former = rename_config(found.config, package)
            warn_of_former_names(former)
        return found

    def _load_choice(self, config_path: str) -> ConfigResult | None:
        found = super().load_config(config_path)
        path = config_path.removesuffix(".yaml")
        present = _RENAMED_CHOICES.get(path) or _RENAMED_MODEL.sub(r"\1_tiny", path)
        if found is not None or present == path:
            return found
        if not (find_package_dir("conf") / f"{present}.yaml").is_file():
            return None
        before, now = (each.replace("/", "=") for each in (path, present))
        print_once(f"hlat: {before} is now {now}; the next version rejects {before}")
        found = super().load_config(present)
        if found is not None and path.startswith("model/"):
            name = path.removeprefix("model/")  # runs contain the name of their model
            OmegaConf.update(found.config, "name", name)
        return found


def _create_interpolation_map(
    overrides: Any, defaults: list[InputDefault], self_added: bool
) -> DictConfig:
    """Return the choices that interpolations in a defaults list refer to; empty without them.

    Hydra creates all choices for each file, which is a tenth of the time of a composition.
    """
    if not any(default.is_interpolation() for default in defaults):
        return OmegaConf.create()
    return _create_map(overrides, defaults, self_added)


def _refuse_hidden_choices(config_search_path: ConfigSearchPath) -> None:
    """Raise ConfigError if a directory of the user has a file with the name of one of conf/."""
    directories = _list_user_dirs(config_search_path)
    if not directories:
        return
    conf = find_package_dir("conf")
    names = [file.relative_to(conf) for file in conf.rglob("*.yaml")]
    raise_config_errors(
        f"{directory / name} is not read, since conf/{name} has the same name; rename it"
        for directory in directories
        for name in names
        if (directory / name).is_file()
    )


def _list_user_dirs(config_search_path: ConfigSearchPath) -> list[Path]:
    entries = [entry for entry in config_search_path.get_path() if entry.provider == "command-line"]
    return [Path((entry.path or "").removeprefix("file://")) for entry in entries]


def _apply_values(config: DictConfig, values: list[Override], overrides: list[Override]) -> None:
    """Apply values of the command line as Hydra does, and record all overrides."""
    task_overrides = [override for override in overrides if not override.is_hydra_override()]
    try:
        others = [override for override in values if not _add_typed_entry(config, override)]
        ConfigLoaderImpl._apply_overrides_to_config(others, config)
    except OmegaConfBaseException as error:
        raise ConfigCompositionException from error
    job = config.hydra.job
    config.hydra.overrides.task = [str(override.input_line) for override in task_overrides]
    config.hydra.overrides.hydra = [
        str(override.input_line) for override in overrides if override not in task_overrides
    ]
    job.override_dirname = get_overrides_dirname(
        overrides=task_overrides,
        kv_sep=job.config.override_dirname.kv_sep,
        item_sep=job.config.override_dirname.item_sep,
        exclude_keys=job.config.override_dirname.exclude_keys,
    )


def _add_typed_entry(config: DictConfig, override: Override) -> bool:
    """Apply `+DICTIONARY.NAME[.KEY]=VALUE` to a dictionary of structured values, such as sources.

    Hydra would create an entry without the schema, which OmegaConf rejects. Return False for other
    overrides.
    """
    keys = override.key_or_group.split(".")
    for end in range(1, len(keys)) if override.is_add() else ():
        parent = OmegaConf.select(config, ".".join(keys[:end]))
        schema = parent._metadata.element_type if isinstance(parent, DictConfig) else None
        if dataclasses.is_dataclass(schema):
            with open_dict(parent):
                parent.setdefault(keys[end], OmegaConf.structured(schema))
            try:
                OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
            except OmegaConfBaseException as error:
                message = f"Error merging override {override.input_line}"
                raise ConfigCompositionException(message) from error
            return True
    return False
