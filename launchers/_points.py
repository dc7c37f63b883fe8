"""Looks at every point of a sweep before the first one starts.

A mistake in the last point should not be found hours after the first has begun, and two points in
one run folder would silently be one.
"""

from collections.abc import Sequence

from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from hlat.config.errors import ConfigError
from hlat.config.explain import explain
from hlat.config.resolve import resolve
from hlat.planning.feasibility import refuse_infeasible


def check(context: HydraContext, config: DictConfig, points: Sequence[Sequence[str]]) -> None:
    """Return if every point can run, each in a folder of its own.

    Raises:
        ConfigError: All problems of all points, with the point's overrides in front.
    """
    problems: list[str] = []
    owners: dict[str, Sequence[str]] = {}
    for point in points:
        try:
            folder = _folder(context, config, point)
        except ConfigError as error:
            problems += [f"[{' '.join(point)}] {problem}" for problem in error.problems]
            continue
        if (owner := owners.setdefault(folder, point)) is not point:
            problems.append(
                f"[{' '.join(point)}] would train in {folder}, as [{' '.join(owner)}] does; "
                "leave run.name out, or give each point its own"
            )
    if problems:
        raise ConfigError(*problems)


def _folder(context: HydraContext, config: DictConfig, point: Sequence[str]) -> str:
    try:
        composed = context.config_loader.load_sweep_config(config, list(point))
        with open_dict(composed):
            del composed["hydra"]
        resolved = resolve(OmegaConf.create(composed))
    except OmegaConfBaseException as error:
        raise explain(error) from error
    refuse_infeasible(resolved)
    return f"{resolved.run.root}/{resolved.run.name}"
