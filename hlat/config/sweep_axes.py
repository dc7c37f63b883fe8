"""Axes of a sweep: keys with several values, on the command line or in a study."""

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf

from hlat.config.compose import compose_config, register_configs
from hlat.config.config_errors import ConfigError
from hlat.config.hydra_errors import convert_hydra_error
from hlat.config.lr_grid import add_lr_axis
from hlat.config.mixture_sampling import add_mixture_axis
from hlat.config.override_keys import list_replaced_axes, validate_distinct_keys
from hlat.config.renamed_keys import rename_override

_AXIS_KEYS = ("sweep", "study.lr_grid.factor", "study.mixture.num_mixtures")
"""Keys that add an axis without a list of values."""


@dataclass(frozen=True)
class SweepAxes:
    """Overrides of all points of a sweep, and its axes."""

    overrides: list[str]
    """Overrides that all points share."""
    axes: dict[str, list[str]]
    """Values of each axis by key, in the order of the sweep."""
    prune: bool
    """True if the sweep skips invalid points."""
    num_trials: int | None = None
    """Number of runs of a search, whose axes are ranges; None for a grid."""

    def list_points(self) -> list[dict[str, str]]:
        """Return the values by key of each point of a grid."""
        keys = list(self.axes)
        return [dict(zip(keys, v, strict=True)) for v in itertools.product(*self.axes.values())]


def is_sweep(overrides: Sequence[str]) -> bool:
    """Return True if overrides choose a study or a grid, or contain several values of a key."""
    return any(o.key_or_group in _AXIS_KEYS or o.is_sweep_override() for o in _parse(overrides))


def load_sweep_axes(overrides: Sequence[str]) -> SweepAxes:
    """Return the axes of a study and of the command line, which overrides those of the study.

    Raises:
        ConfigError: An override is invalid, or a key is set more than once.
    """
    overrides = [rename_override(override) for override in overrides]
    validate_distinct_keys(overrides)
    parsed = _parse(overrides)
    swept = {o.key_or_group: _list_values(o) for o in parsed if o.is_sweep_override()}
    fixed = [str(o.input_line) for o in parsed if not o.is_sweep_override()]
    config = compose_config(fixed, return_hydra_config=True)
    add_lr_axis(config, swept)
    add_mixture_axis(config, swept)
    hydra = config.hydra
    params: Any = OmegaConf.to_container(hydra.sweeper.get("params") or OmegaConf.create({}))
    for message in list_replaced_axes(params, overrides):
        print(message, file=sys.stderr)
    fixed_keys = {o.key_or_group for o in parsed if not o.is_sweep_override()}
    words = [f"{key}={value}" for key, value in params.items() if key not in fixed_keys]
    trials = hydra.sweeper.get("trials")
    if trials is not None:
        return SweepAxes(fixed, {}, prune=True, num_trials=int(trials))
    axes = {o.key_or_group: _list_values(o) for o in _parse(words)} | swept
    return SweepAxes(fixed, axes, prune=bool(hydra.launcher.get("prune", False)))


def _parse(overrides: Sequence[str]) -> list[Override]:
    register_configs()
    try:
        return OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise convert_hydra_error(error) from error


def _list_values(override: Override) -> list[str]:
    """Return the values of an axis as texts of overrides."""
    if not override.is_sweep_override():
        return [str(override.input_line).partition("=")[2]]
    if not (override.is_choice_sweep() or override.is_range_sweep()):
        raise ConfigError(f"{override.input_line}: a sweep needs a list of values")
    return [str(value) for value in override.sweep_string_iterator()]
