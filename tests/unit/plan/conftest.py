"""Fixture that composes each configuration once."""

import copy
import functools
from collections.abc import Iterator, Sequence

import pytest
from omegaconf import DictConfig

from hlat.config import compose as composition


@pytest.fixture(scope="session", autouse=True)
def _cache_compositions() -> Iterator[None]:
    """Replace compose_config by a function that returns copies of cached configurations."""
    compose_config = composition.compose_config

    @functools.lru_cache(100)
    def compose_once(overrides: tuple[str, ...], return_hydra_config: bool) -> DictConfig:
        return compose_config(overrides, return_hydra_config)

    def compose_copy(overrides: Sequence[str], return_hydra_config: bool = False) -> DictConfig:
        return copy.deepcopy(compose_once(tuple(overrides), return_hydra_config))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(composition, "compose_config", compose_copy)
        yield
