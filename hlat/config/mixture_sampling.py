"""Axis of a sweep that searches the best mixture: random weights of the sources."""

import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
_START_DIGITS = 2
"""Digits of a random start."""
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
    typed = convert_to_dataclasses(run)
    text = ",".join(_format_timeline(mixture, typed) for mixture in sample_mixtures(typed))
    with open_dict(config.hydra.sweeper):
        config.hydra.sweeper.params = {**params, MIXTURE_KEY: text}


class SampledMixture(NamedTuple):
    """Proportions by source from a start to the end of the run."""

    weights: dict[str, float]
    start: float
    """Fraction of the steps before it, which have the base weights."""


def sample_mixtures(config: Config) -> list[SampledMixture | None]:
    """Return the mixtures of `config.study.mixture`.

    The first one is the base, which is None, as its run has the timeline of other runs. All are
    distinct.

    Raises:
        ConfigError: The settings are invalid, or no further mixture satisfies the limits.
    """
    sample, num_mixtures = config.study.mixture, config.study.mixture.num_mixtures
    assert num_mixtures is not None, "the caller checks it"
    raise_config_errors(_find_problems(config))
    base = _normalize({name: source.weight for name, source in config.data.sources.items()})
    center = _get_center(config, base)
    limits = compute_weight_limits(
        base, sample.tokens_per_epoch, sample.max_epochs, _count_run_tokens(config)
    )
    generator = random.Random(sample.seed)  # noqa: S311 (no cryptography)
    mixtures = [SampledMixture(base, 0.0)]
    for _ in range(_MAX_TRIES * num_mixtures):
        if len(mixtures) == num_mixtures:
            break
        weights = dict(zip(base, _draw([*center.values()], sample, generator), strict=True))
        drawn = SampledMixture(weights, _sample_start(sample, generator))
        start = drawn.start
        shares = {name: start * base[name] + (1 - start) * weights[name] for name in base}
        within = all(share <= limits[name] for name, share in shares.items())
        if within and drawn not in mixtures:
            mixtures.append(drawn)
    if len(mixtures) < num_mixtures:
        raise ConfigError(
            f"study.mixture has only {len(mixtures)} of num_mixtures={num_mixtures} distinct "
            f"mixtures with at most max_epochs={sample.max_epochs:g}; raise max_epochs, or shorten "
            "the runs"
        )
    return [None, *mixtures[1:]]


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


def _normalize(weights: Mapping[str, float]) -> dict[str, float]:
    """Return proportions with sum 1; zeros if all weights are 0."""
    total = math.fsum(weights.values()) or 1.0
    return {name: weight / total for name, weight in weights.items()}


def _get_center(config: Config, base: dict[str, float]) -> dict[str, float]:
    """Return the proportions around which the mixtures are sampled."""
    weights = config.phase.timeline[-1].weights
    if weights is None:
        return base
    return _normalize({name: weights.get(name, 0.0) for name in base})


def _sample_start(sample: MixtureSampleConfig, generator: random.Random) -> float:
    """Return a random start of the last phase; 0 for mixtures of the whole run."""
    if sample.min_start is None or sample.max_start is None:
        return 0.0
    start = round(generator.uniform(sample.min_start, sample.max_start), _START_DIGITS)
    return min(max(start, sample.min_start), sample.max_start)


def _draw(
    center: Sequence[float], sample: MixtureSampleConfig, generator: random.Random
) -> list[float]:
    """Return random proportions around the center; those of 0 stay 0.

    Gamma variables that are divided by their sum have the Dirichlet distribution (Devroye,
    Non-Uniform Random Variate Generation, 1986, section XI.4.1).
    """
    low, high = math.log(sample.min_strength), math.log(sample.max_strength)
    strength = math.exp(generator.uniform(low, high))
    values = [generator.gammavariate(strength * part, 1) if part else 0.0 for part in center]
    total = math.fsum(values)
    if not total:  # all variables of a small strength can underflow
        return _draw(center, sample, generator)
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
    yield from _find_phase_problems(config)


def _find_phase_problems(config: Config) -> Iterator[str]:
    """Yield the problems of the stages, and of the start of a last phase."""
    sample, stages = config.study.mixture, config.phase.timeline
    given = {key: getattr(sample, key) for key in ("min_start", "max_start")}
    missing = [key for key, value in given.items() if value is None]
    if len(missing) == 2:
        if len(stages) > 1 or stages[0].weights is not None:
            yield (
                f"study.mixture varies the weights of data.sources, and phase={config.phase.name} "
                f"has {'stages' if len(stages) > 1 else 'weights'} of its own; use phase=base, or "
                "set study.mixture.min_start and max_start to vary those of the last stage"
            )
        return
    if missing:
        yield (
            f"study.mixture.{missing[0]} is null, and the start of a last phase is between "
            "min_start and max_start; set both, to equal values for a fixed start"
        )
    elif given["min_start"] > given["max_start"]:
        yield (
            f"study.mixture.min_start={given['min_start']:g} is above "
            f"study.mixture.max_start={given['max_start']:g}; exchange them"
        )
    if len(stages) > 2 or stages[0].weights is not None:
        yield (
            f"study.mixture varies the last of two stages, of which the first has the weights of "
            f"data.sources, and phase={config.phase.name} has other ones; use phase=base"
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
    sampled = config.phase.timeline[-1].weights or {}
    unused = [name for name, s in sources.items() if not (s.weight or sampled.get(name))]
    if unused:
        yield (
            f"data.sources.{unused[0]}.weight=0 is never varied, since random mixtures are around "
            f"the base; remove it with ~data.sources.{unused[0]}, or raise its weight"
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


def _format_timeline(mixture: SampledMixture | None, config: Config) -> str:
    """Return a timeline as the value of an override."""
    if mixture is None:
        return "[{name:base}]"
    pairs = ",".join(f"{name}:{weight:g}" for name, weight in mixture.weights.items())
    sampled = f"{{name:sampled,weights:{{{pairs}}}}}"
    if not mixture.start:
        return f"[{sampled}]"
    steps = max(1, round(mixture.start * compute_total_steps(config)))
    return f"[{{name:base,tokens:{steps * config.batch.tokens_per_step}}},{sampled}]"
