"""Axis of a sweep that searches the best mixture: random weights of the sources."""

import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from hlat.config.batch_steps import count_tokens
from hlat.config.bounds import find_bounds_violations
from hlat.config.config_errors import ConfigError, raise_config_errors
from hlat.config.resolve import convert_to_dataclasses
from hlat.config.run import Config
from hlat.config.run_steps import compute_total_steps
from hlat.config.study import MixtureSampleConfig

MIXTURE_KEY = "phase.timeline"
"""Setting with the mixture of a point."""
WEIGHT_STEP = 0.001
"""Unit of random proportions, so that a run states its mixture in few digits."""
_CHANGING_GROUPS = ("data", "phase")
"""Groups whose choices change the sources or the stages."""
_MAX_TRIES = 1000
"""Random mixtures per accepted one, after which the limits are considered unattainable."""


def add_mixture_axis(config: DictConfig, swept: Collection[str]) -> None:
    """Add the mixtures of `study.mixture` to the axes of a composed sweep, if it has any.

    `swept` contains the keys of the axes on the command line.

    Raises:
        ConfigError: The settings are invalid, or the sources or the phase have no mixture to vary.
    """
    params = config.hydra.sweeper.get("params") or {}
    axes = {*swept, *params}
    schema = OmegaConf.structured(MixtureSampleConfig)
    sample: Any = OmegaConf.to_object(OmegaConf.merge(schema, config.study.mixture))
    assert isinstance(sample, MixtureSampleConfig)
    if sample.num_mixtures is None or MIXTURE_KEY in axes:
        return
    if changing := [group for group in _CHANGING_GROUPS if group in axes]:
        raise ConfigError(
            f"{changing[0]} is an axis, and study.mixture samples the mixtures of one choice; "
            f"start one sweep per {changing[0]}"
        )
    run = config.copy()
    with open_dict(run):
        run.pop("hydra")
    text = ",".join(map(_format_timeline, sample_mixtures(convert_to_dataclasses(run))))
    with open_dict(config.hydra.sweeper):
        config.hydra.sweeper.params = {**params, MIXTURE_KEY: text}


def sample_mixtures(config: Config) -> list[dict[str, float] | None]:
    """Return the proportions by source of each mixture of `config.study.mixture`.

    The first one is the base, which is None, as its run has the timeline of other runs. All are
    distinct.

    Raises:
        ConfigError: The settings are invalid, or no further mixture satisfies the limits.
    """
    sample, num_mixtures = config.study.mixture, config.study.mixture.num_mixtures
    assert num_mixtures is not None, "the caller checks it"
    raise_config_errors(_find_problems(config))
    total = math.fsum(source.weight for source in config.data.sources.values())
    base = {name: source.weight / total for name, source in config.data.sources.items()}
    limits = compute_weight_limits(
        base, sample.tokens_per_epoch, sample.max_epochs, _count_run_tokens(config)
    )
    generator = random.Random(sample.seed)  # noqa: S311 (no cryptography)
    mixtures = [list(base.values())]
    for _ in range(_MAX_TRIES * num_mixtures):
        if len(mixtures) == num_mixtures:
            break
        drawn = _draw([*base.values()], sample, generator)
        within = all(weight <= limits[name] for name, weight in zip(base, drawn, strict=True))
        if within and drawn not in mixtures:
            mixtures.append(drawn)
    if len(mixtures) < num_mixtures:
        raise ConfigError(
            f"study.mixture has only {len(mixtures)} of num_mixtures={num_mixtures} distinct "
            f"mixtures with at most max_epochs={sample.max_epochs:g}; raise max_epochs, or shorten "
            "the runs"
        )
    return [None, *(dict(zip(base, weights, strict=True)) for weights in mixtures[1:])]


def compute_weight_limits(
    sources: Collection[str],
    tokens_per_epoch: Mapping[str, float],
    max_epochs: float,
    tokens: float,
) -> dict[str, float]:
    """Return the largest proportion of each source in a run of `tokens`; 1 without a limit."""
    known = {name: tokens_per_epoch.get(name, math.inf) for name in sources}
    return {name: min(1.0, max_epochs * size / tokens) for name, size in known.items()}


def round_proportions(proportions: Sequence[float]) -> list[float]:
    """Return multiples of `WEIGHT_STEP` with sum 1, by the method of largest remainders."""
    count = round(1 / WEIGHT_STEP)
    scaled = [count * value for value in proportions]
    units = [math.floor(value) for value in scaled]
    order = sorted(range(len(units)), key=lambda index: units[index] - scaled[index])
    for index in order[: count - sum(units)]:
        units[index] += 1
    return [unit / count for unit in units]


def _draw(
    base: Sequence[float], sample: MixtureSampleConfig, generator: random.Random
) -> list[float]:
    """Return random proportions around the base.

    Gamma variables that are divided by their sum have the Dirichlet distribution (Devroye,
    Non-Uniform Random Variate Generation, 1986, section XI.4.1).
    """
    low, high = math.log(sample.min_strength), math.log(sample.max_strength)
    strength = math.exp(generator.uniform(low, high))
    values = [generator.gammavariate(strength * share, 1) for share in base]
    total = math.fsum(values)
    if not total:  # all variables of a small strength can underflow
        return _draw(base, sample, generator)
    return round_proportions([value / total for value in values])


def _count_run_tokens(config: Config) -> int:
    return count_tokens(compute_total_steps(config), config.batch)


def _find_problems(config: Config) -> Iterator[str]:
    sample, sources = config.study.mixture, config.data.sources
    yield from find_bounds_violations(sample, "study.mixture.")
    if sample.min_strength > sample.max_strength:
        yield (
            f"study.mixture.min_strength={sample.min_strength:g} is above "
            f"study.mixture.max_strength={sample.max_strength:g}; exchange them"
        )
    for name in sample.tokens_per_epoch:
        if name not in sources:
            yield (
                f"study.mixture.tokens_per_epoch.{name}: there is no such source; use "
                f"{', '.join(sources)}"
            )
    yield from _find_source_problems(config)
    stages = config.phase.timeline
    if len(stages) > 1 or stages[0].weights is not None:
        yield (
            f"study.mixture varies the weights of data.sources, and phase={config.phase.name} has "
            f"{'stages' if len(stages) > 1 else 'weights'} of its own; use phase=base"
        )


def _find_source_problems(config: Config) -> Iterator[str]:
    """Yield the problems of the base weights."""
    sources, sample = config.data.sources, config.study.mixture
    if len(sources) < 2:
        yield (
            f"study.mixture varies the weights of several sources, and data={config.data.name} has "
            f"the only source {', '.join(sources)}; add another one under data.sources"
        )
        return
    if absent := [name for name, source in sources.items() if source.weight == 0]:
        yield (
            f"data.sources.{absent[0]}.weight=0 is never varied, since random mixtures are around "
            f"the base; remove it with ~data.sources.{absent[0]}, or raise its weight"
        )
        return
    tokens = _count_run_tokens(config)
    total = math.fsum(source.weight for source in sources.values())
    for name, size in sample.tokens_per_epoch.items():
        epochs = sources[name].weight / total * tokens / size if name in sources else 0
        if epochs > sample.max_epochs:
            yield (
                f"the base weights read data.sources.{name} {epochs:.3g} times in {tokens:,} "
                f"tokens, more than study.mixture.max_epochs={sample.max_epochs:g}; shorten the "
                f"run, lower data.sources.{name}.weight, or raise max_epochs"
            )


def _format_timeline(weights: Mapping[str, float] | None) -> str:
    """Return a timeline of one stage as the value of an override."""
    if weights is None:
        return "[{name:base}]"
    pairs = ",".join(f"{name}:{weight:g}" for name, weight in weights.items())
    return f"[{{name:sampled,weights:{{{pairs}}}}}]"
