"""Fixtures of the configuration's tests."""

import copy
import functools
from collections.abc import Callable

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from hlat.config import compose as composition
from hlat.config.package_dirs import find_package_dir


@pytest.fixture(scope="session")
def compose() -> Callable[..., DictConfig]:
    """Compose a configuration from overrides, with each selection of groups composed once."""
    composition.register_configs()
    parser = OverridesParser.create()

    @functools.lru_cache(100)
    def compose_groups(*overrides: str) -> DictConfig:
        with initialize_config_dir(config_dir=str(find_package_dir("conf")), version_base="1.3"):
            return hydra_compose("config", list(overrides))

    def compose_overrides(*overrides: str) -> DictConfig:
        is_group = {override: "." not in override.partition("=")[0] for override in overrides}
        groups = [override for override in overrides if is_group[override]]
        values = [override for override in overrides if not is_group[override]]
        config = copy.deepcopy(compose_groups(*groups))
        ConfigLoaderImpl._apply_overrides_to_config(parser.parse_overrides(values), config)
        return config

    return compose_overrides
