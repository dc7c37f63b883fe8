"""Points of a scaling law: parameters, tokens, FLOPs and loss of models, with their validation."""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hlat.config.config_errors import ConfigError, raise_config_errors
from hlat.storage.bounded_files import read_bounded
from hlat.study.power_law import Array

FLOPS_PER_PARAMETER = 6
"""FLOPs per parameter and token of training (Kaplan et al., arXiv 2001.08361, section 2.1)."""
MIN_POINTS = 6
"""Points of a fit of five constants with at least one degree of freedom."""
MIN_VALUES = 3
"""Distinct sizes and numbers of tokens: a power law with an irreducible term has 3 constants."""
_MAX_FLOPS_RATIO = 50.0
"""Largest factor between the FLOPs and 6 N D. Without their embeddings, models of 0.1M parameters
with a vocabulary of 50,000 tokens need 30 times as many; other units differ by 1,000 or more."""
_MAX_FILE_BYTES = 2**26


@dataclass(frozen=True)
class PointColumns:
    """Columns of a table of points; None if a value follows from the others.

    Attributes:
        parameters: Parameters of the model.
        tokens: Training tokens; None: `tokens`, or else FLOPs / (6 parameters).
        flops: Training FLOPs; None: `flops`, or else 6 parameters x tokens.
        metric: Loss or another metric of which lower is better.
        group: Value by which a bootstrap resamples whole groups; None: each point separately.
        accuracy: Accuracy of a task; None: no prediction of accuracy.
        learning_rate: Learning rate; None: `learning_rate`, if there is such a column.
        batch: Tokens of a step; None: `batch_tokens`, if there is such a column.
    """

    parameters: str
    tokens: str | None
    flops: str | None
    metric: str
    group: str | None = None
    accuracy: str | None = None
    learning_rate: str | None = None
    batch: str | None = None


@dataclass(frozen=True)
class ScalingPoints:
    """Models of one family.

    Attributes:
        source: File or directories, for messages.
        metric: Name of the column of the losses.
        names: Name of each point.
        parameters: Parameters N [points].
        tokens: Training tokens D [points].
        flops: Training FLOPs C [points].
        losses: Losses L [points].
        groups: Group of each point that a bootstrap resamples.
        other_parameters: Another count of the parameters [points]; None if unknown.
        other_name: Name of its column.
        epochs: Epochs of the most repeated source [points]; NaN if unknown.
        accuracies: Accuracy of a task [points]; None without one.
        accuracy_name: Name of its column.
        learning_rates: Learning rates [points]; None if unknown.
        batch_tokens: Tokens of a step [points]; None if unknown.
    """

    source: str
    metric: str
    names: Sequence[str]
    parameters: Array
    tokens: Array
    flops: Array
    losses: Array
    groups: Sequence[str]
    other_parameters: Array | None = None
    other_name: str = ""
    epochs: Array | None = None
    accuracies: Array | None = None
    accuracy_name: str = ""
    learning_rates: Array | None = None
    batch_tokens: Array | None = None

    def __len__(self) -> int:
        return len(self.names)

    @property
    def inputs(self) -> Array:
        """Parameters and tokens [2, points]."""
        return np.stack([self.parameters, self.tokens])

    @property
    def flops_factor(self) -> float:
        """Geometric mean of FLOPs / (parameters x tokens); about 6."""
        return float(np.exp(np.log(self.flops / self.parameters / self.tokens).mean()))

    def select(self, chosen: NDArray[np.bool_]) -> "ScalingPoints":
        """Return the points where `chosen` [points] is true."""
        indices = np.flatnonzero(chosen).tolist()

        def select_known(values: Array | None) -> Array | None:
            return None if values is None else values[chosen]

        return replace(
            self,
            names=[self.names[i] for i in indices],
            groups=[self.groups[i] for i in indices],
            parameters=self.parameters[chosen],
            tokens=self.tokens[chosen],
            flops=self.flops[chosen],
            losses=self.losses[chosen],
            other_parameters=select_known(self.other_parameters),
            epochs=select_known(self.epochs),
            accuracies=select_known(self.accuracies),
            learning_rates=select_known(self.learning_rates),
            batch_tokens=select_known(self.batch_tokens),
        )

    def drop_highest(self, count: int) -> "ScalingPoints":
        """Return the points without those of the `count` highest losses.

        Raises:
            ConfigError: There are not more than `count` points.
        """
        if count >= len(self):
            raise ConfigError(f"drop_highest={count}, but {self.source} has {len(self)} points")
        chosen = np.ones(len(self), bool)
        chosen[np.argsort(self.losses, kind="stable")[len(self) - count :]] = False
        return self.select(chosen)


def load_csv_points(file: Path, columns: PointColumns) -> ScalingPoints:
    """Return the points of a CSV file with a header.

    Raises:
        ConfigError: The file cannot be read, lacks a column, or contains a value that is not a
            positive number.
    """
    rows = read_csv_rows(file)
    columns = _complete_columns(file, columns, [name for name in rows[0][1] if name])
    problems: list[str] = []

    def parse(name: str | None) -> Array | None:
        if name is None:
            return None
        values = [_parse_cell(file, line, row, name) for line, row in rows]
        problems.extend(value for value in values if isinstance(value, str))
        return np.array([math.nan if isinstance(value, str) else value for value in values])

    parameters, losses = parse(columns.parameters), parse(columns.metric)
    tokens, flops = parse(columns.tokens), parse(columns.flops)
    accuracies = parse(columns.accuracy)
    learning_rates, batch_tokens = parse(columns.learning_rate), parse(columns.batch)
    raise_config_errors(problems)
    assert parameters is not None
    assert losses is not None
    tokens, flops = _complete(parameters, tokens, flops)
    lines = [f"line {line}" for line, _ in rows]
    groups = lines if columns.group is None else [row[columns.group] for _, row in rows]
    return ScalingPoints(
        source=str(file),
        metric=columns.metric,
        names=lines,
        parameters=parameters,
        tokens=tokens,
        flops=flops,
        losses=losses,
        groups=groups,
        accuracies=accuracies,
        accuracy_name=columns.accuracy or "",
        learning_rates=learning_rates,
        batch_tokens=batch_tokens,
    )


def validate_points(points: ScalingPoints) -> None:
    """Raise ConfigError if a law of parameters and tokens cannot be fitted to the points."""
    raise_config_errors(_find_problems(points))


def _find_problems(points: ScalingPoints) -> Iterator[str]:
    if len(points) < MIN_POINTS:
        yield (
            f"{points.source} has {len(points)} points, and the law of parameters and tokens has 5 "
            f"constants; give at least {MIN_POINTS} points"
        )
        return
    for name, values in (("parameters", points.parameters), ("tokens", points.tokens)):
        if (count := count_distinct(values)) < MIN_VALUES:
            such = f"{values[0]:.4g}" + (f" and {values.max():.4g}" if count > 1 else "")
            yield (
                f"all points of {points.source} have {such} {name}, so that their exponent is "
                f"unknown; give points with at least {MIN_VALUES} numbers of {name}"
            )
    ratios = points.flops / (FLOPS_PER_PARAMETER * points.parameters * points.tokens)
    worst = int(np.abs(np.log(ratios)).argmax())
    if not 1 / _MAX_FLOPS_RATIO <= ratios[worst] <= _MAX_FLOPS_RATIO:
        yield (
            f"{points.source}, {points.names[worst]}: {points.flops[worst]:.4g} FLOPs are "
            f"{ratios[worst]:.3g} times 6 x {points.parameters[worst]:.4g} parameters x "
            f"{points.tokens[worst]:.4g} tokens; give FLOPs, parameters and tokens in units of 1"
        )


def count_distinct(values: Array) -> int:
    """Return the number of values that differ by more than 0.1%."""
    logs = np.sort(np.log(values))
    return 1 + int((np.diff(logs) > 1e-3).sum())


def _complete(parameters: Array, tokens: Array | None, flops: Array | None) -> tuple[Array, Array]:
    """Return tokens and FLOPs, of which one may follow from the other."""
    if tokens is None:
        assert flops is not None, "the command requires one of them"
        return flops / (FLOPS_PER_PARAMETER * parameters), flops
    return tokens, FLOPS_PER_PARAMETER * parameters * tokens if flops is None else flops


def read_csv_rows(file: Path, key: str = "data") -> list[tuple[int, dict[str, str]]]:
    """Return line number and cells of each row of a CSV file with a header.

    Raises:
        ConfigError: The file cannot be read or has no rows; `key` is its setting in the message.
    """
    try:
        text = read_bounded(file, _MAX_FILE_BYTES).decode("utf-8-sig")
        reader = csv.DictReader(io.StringIO(text, newline=""), restval="", restkey="")
        rows = [(reader.line_num, row) for row in reader]
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{key}={file} cannot be read ({reason}); give a CSV file") from error
    except (csv.Error, ValueError) as error:
        raise ConfigError(f"{key}={file} is not a CSV file in UTF-8 ({error})") from error
    if not rows:
        raise ConfigError(f"{key}={file} has no rows; give a CSV file with a header and points")
    return rows


def _complete_columns(file: Path, columns: PointColumns, header: Sequence[str]) -> PointColumns:
    """Return the columns with those of the default names, if the file has them.

    Raises:
        ConfigError: The file lacks a column.
    """

    def find_column(given: str | None, default: str) -> str | None:
        return given or (default if default in header else None)

    completed = replace(
        columns,
        tokens=find_column(columns.tokens, "tokens"),
        flops=find_column(columns.flops, "flops"),
        learning_rate=find_column(columns.learning_rate, "learning_rate"),
        batch=find_column(columns.batch, "batch_tokens"),
    )
    listed = f"; columns of the file: {', '.join(header)}"
    if completed.tokens is None and completed.flops is None:
        raise ConfigError(
            f"{file} has no column tokens or flops; name one with tokens=COLUMN or flops=COLUMN"
            f"{listed}"
        )
    for key, name in vars(completed).items():
        if name is not None and name not in header:
            raise ConfigError(f"{file} has no column {name}; name it with {key}=COLUMN{listed}")
    return completed


def _parse_cell(file: Path, line: int, row: Mapping[str, str], name: str) -> float | str:
    """Return a positive number, or the problem of the cell."""
    try:
        value = float(row[name])
    except ValueError:
        value = math.nan
    if 0 < value < math.inf:
        return value
    text = row[name] if len(row[name]) <= 40 else f"{row[name][:37]}..."
    return (
        f"{file}, line {line}: {name}={text or 'nothing'} is not a number above 0; correct or "
        "remove the line"
    )
