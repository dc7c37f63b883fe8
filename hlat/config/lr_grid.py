"""Axis of a sweep that searches the best learning rate: the grid of `study.lr_grid`."""

import math
from collections.abc import Collection
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from hlat.config.bounds import find_bounds_violations
from hlat.config.config_errors import ConfigError, raise_config_errors
from hlat.config.study import LrGridConfig

LR_KEY = "optimizer.lr"
_CENTER_GROUPS = ("model", "optimizer", "experiment")
"""Groups whose choices have a learning rate."""
_DIGITS = 4
"""Significant digits of a rate, so that a grid and its extension have equal rates."""


def add_lr_axis(config: DictConfig, swept: Collection[str]) -> None:
    """Add the grid to the axes of a composed sweep, if it has a factor and no axis optimizer.lr.

    `swept` contains the keys of the axes on the command line.

    Raises:
        ConfigError: The grid is invalid, or another axis changes its center.
    """
    grid = _parse_grid(config)
    params = config.hydra.sweeper.get("params") or {}
    axes = {*swept, *params}
    if grid.factor is None or LR_KEY in axes:
        return
    if any(word.partition("=")[0] == LR_KEY for word in config.hydra.overrides.task):
        rate = f"{config.optimizer.lr:g}"
        raise ConfigError(
            f"{LR_KEY}={rate} is one rate, and study.lr_grid.factor={grid.factor:g} is a grid of "
            f"rates; set study.lr_grid.center={rate} instead"
        )
    changing = [group for group in _CENTER_GROUPS if group in axes]
    if grid.center is None and changing:
        raise ConfigError(
            f"{changing[0]} is an axis, and its choices may have different learning rates; set "
            f"study.lr_grid.center, such as study.lr_grid.center={config.optimizer.lr:g}, or start "
            f"one sweep per {changing[0]}"
        )
    rates = list_rates(grid, float(config.optimizer.lr))
    text = ",".join(f"{rate:g}" for rate in rates)
    with open_dict(config.hydra.sweeper):
        config.hydra.sweeper.params = {**params, LR_KEY: text}


def list_rates(grid: LrGridConfig, preset_rate: float) -> list[float]:
    """Return the rates of a grid with a factor, in ascending order.

    Raises:
        ConfigError: The grid has fewer than three rates, or a value is out of bounds.
    """
    raise_config_errors(find_bounds_violations(grid, "study.lr_grid."))
    assert grid.factor is not None, "add_lr_axis checks it"
    if grid.below + grid.above < 2:
        raise ConfigError(
            f"study.lr_grid.below={grid.below} and study.lr_grid.above={grid.above} are too few "
            "rates for an optimum; set both to 1 or more"
        )
    center = preset_rate if grid.center is None else grid.center
    rates = [center * grid.factor**n for n in range(-grid.below, grid.above + 1)]
    if not all(0 < rate < math.inf for rate in rates):
        raise ConfigError(f"study.lr_grid has rates from {rates[0]:g} to {rates[-1]:g}; reduce it")
    return [float(f"{rate:.{_DIGITS}g}") for rate in rates]


def _parse_grid(config: DictConfig) -> LrGridConfig:
    schema = OmegaConf.structured(LrGridConfig)
    grid: Any = OmegaConf.to_object(OmegaConf.merge(schema, config.study.lr_grid))
    assert isinstance(grid, LrGridConfig)
    return grid
