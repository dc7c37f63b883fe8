"""Mixtures of sources with the held-out losses of their models, and their validation."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hlat.config.config_errors import ConfigError, raise_config_errors
from hlat.study.power_law import Array
from hlat.study.scaling_points import read_csv_rows

NUM_FOLDS = 10
"""Largest number of parts of a cross-validation."""
_SAME_WEIGHT = 1e-6
"""Largest difference of the weights of one mixture, as of runs with several seeds."""
_ROUNDING = 0.01
"""Difference of a sum of rounded proportions from 1; RegMix publishes 0.996 to 1.003."""
_NUM_NAMED = 3


@dataclass(frozen=True)
class MixturePoints:
    """Models of one size that were trained on different mixtures.

    Attributes:
        location: Files or directories, for messages.
        names: Name of each point.
        sources: Names of the sources of training data.
        domains: Names of the held-out sets.
        weights: Proportions of tokens [points, sources]; the sum of a row is 1 but for rounding.
        starts: Fraction of the tokens before these weights [points], which have the proportions of
            the base; 0: weights of the whole run, 1: a run of the base in a study of last phases.
        losses: Held-out loss [points, domains].
        base: Proportions of the base mixture [sources].
        tokens: Training tokens of the longest run; NaN if unknown.
        tokens_per_epoch: Tokens of one epoch of each source [sources]; NaN if unknown.
        exponent: Exponent of the recent shares; NaN: the shares over the run are the only features.
    """

    location: str
    names: Sequence[str]
    sources: Sequence[str]
    domains: Sequence[str]
    weights: Array
    starts: Array
    losses: Array
    base: Array
    tokens: float
    tokens_per_epoch: Array
    exponent: float = math.nan

    def __len__(self) -> int:
        return len(self.names)

    @property
    def mixtures(self) -> NDArray[np.intp]:
        """Index of the mixture of each point [points]; runs with other seeds share one."""
        columns = np.column_stack([self.weights, self.starts])
        rounded = np.round(columns / _SAME_WEIGHT)
        _, indices = np.unique(rounded, axis=0, return_inverse=True)
        return np.asarray(indices, np.intp).ravel()

    @property
    def has_phase(self) -> NDArray[np.bool_]:
        """True for the points with a last phase of other weights [points]."""
        return np.asarray((self.starts > 0) & (self.starts < 1))

    @property
    def features(self) -> Array:
        """Inputs of a regression [points, features]."""
        return self.build_features(self.weights, self.starts)

    def build_features(self, weights: Array, starts: Array) -> Array:
        """Return the inputs of a regression [mixtures, features].

        Args:
            weights: Proportions from a start to the end [mixtures, sources].
            starts: Fraction of the tokens before it [mixtures].
        """
        shares = compute_shares(weights, starts, self.base)
        if math.isnan(self.exponent):
            return shares
        # The last recent share follows from the others, as the sum of all is 1
        recent = compute_shares(weights, starts, self.base, self.exponent)[:, :-1]
        return np.hstack([shares, recent])


def compute_shares(weights: Array, starts: Array, base: Array, exponent: float = 1.0) -> Array:
    """Return the mean of the proportions over a run [mixtures, sources].

    Args:
        weights: Proportions from a start to the end [mixtures, sources].
        starts: Fraction of the tokens before it [mixtures].
        base: Proportions until then [sources].
        exponent: The weight of the tokens until a fraction t of the run is t^exponent; 1: all
            tokens have the same weight.
    """
    before = starts[:, None] ** exponent
    return np.asarray(before * base + (1 - before) * weights)


def load_csv_mixtures(weights_file: Path, losses_file: Path) -> MixturePoints:
    """Return the points of two CSV files that share their first column, the name of a point.

    The other columns are the weights of sources, and the losses of domains. Weights with a sum of 1
    but for rounding are unchanged, so that fits of published files are repeatable. The base is the
    mean mixture. The order is that of the weights; points without losses are omitted.

    Raises:
        ConfigError: A file cannot be read, has a wrong value or a repeated name, or the files have
            no name in common.
    """
    sources, weights = _load_table(weights_file, "data", with_zero=True)
    domains, losses = _load_table(losses_file, "losses", with_zero=False)
    names = [name for name in weights if name in losses]
    if not names:
        raise ConfigError(
            f"data={weights_file} and losses={losses_file} have no name of their first columns in "
            "common; give the same names to the same points"
        )
    table = np.array([weights[name] for name in names])
    if np.abs(table.sum(1) - 1).max() > _ROUNDING:
        table = normalize_weights(table)
    return MixturePoints(
        location=f"{weights_file}, {losses_file}",
        names=names,
        sources=sources,
        domains=domains,
        weights=table,
        starts=np.zeros(len(names)),
        losses=np.array([losses[name] for name in names]),
        base=table.mean(0),
        tokens=math.nan,
        tokens_per_epoch=np.full(len(sources), math.nan),
    )


def normalize_weights(weights: Array) -> Array:
    """Return proportions with sum 1 from weights [..., sources]."""
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def validate_mixtures(points: MixturePoints) -> None:
    """Raise ConfigError if no regression can be fitted to the points and cross-validated."""
    raise_config_errors(_find_problems(points))


def _find_problems(points: MixturePoints) -> Iterator[str]:
    num_sources, num_mixtures = len(points.sources), int(points.mixtures.max()) + 1
    if num_sources < 2:
        yield (
            f"{points.location} has the only source {points.sources[0]}, so that its weight is "
            "always 1; a mixture needs at least two sources"
        )
        return
    # Twice the constants of the log-linear form, with recent shares if there is a last phase
    required = 4 * num_sources if points.has_phase.any() else 2 * (num_sources + 1)
    if num_mixtures < required:
        yield (
            f"{points.location} has {num_mixtures:,} mixtures of {num_sources} sources; train at "
            f"least {required} for a cross-validated regression, such as with "
            f"study.mixture.num_mixtures={4 * required}"
        )
        return
    spans = np.ptp(points.features, axis=0)
    constant = [name for name, span in zip(points.sources, spans, strict=True) if span == 0]
    if constant:
        weight = float(points.weights[0, points.sources.index(constant[0])])
        yield (
            f"{', '.join(constant[:_NUM_NAMED])} has the weight {weight:.3g} in all mixtures of "
            f"{points.location}, so that its effect is unknown; vary it, or remove the source"
        )


def _load_table(file: Path, key: str, with_zero: bool) -> tuple[list[str], dict[str, list[float]]]:
    """Return the columns after the first one, and the values of each row by its name."""
    rows = read_csv_rows(file, key)
    label, *columns = [name for name in rows[0][1] if name]
    if not columns:
        raise ConfigError(
            f"{key}={file} has the only column {label}; give one column for the names of the "
            "points, and one for each source or domain"
        )
    problems: list[str] = []
    table: dict[str, list[float]] = {}
    for line, row in rows:
        values = [_parse_cell(row, name) for name in columns]
        for name, value in zip(columns, values, strict=True):
            if not (0 < value < math.inf or (with_zero and value == 0)):
                least = "not negative" if with_zero else "above 0"
                problems.append(
                    f"{file}, line {line}: {name}={row[name][:40] or 'nothing'} is not a finite "
                    f"number that is {least}; correct or remove the line"
                )
        if row[label] in table:
            problems.append(f"{file}, line {line}: {label}={row[label][:40]} is repeated")
        if with_zero and not any(values):
            problems.append(f"{file}, line {line}: all weights are 0; correct or remove the line")
        table[row[label]] = values
    raise_config_errors(problems)
    return columns, table


def _parse_cell(row: Mapping[str, str], name: str) -> float:
    try:
        return float(row[name])
    except ValueError:
        return math.nan
