"""Points of a scaling law from finished runs, and the point of a run that is not trained yet."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hlat.config.batch_steps import count_tokens
from hlat.config.config_errors import ConfigError
from hlat.config.model import ModelConfig
from hlat.config.run import Config
from hlat.config.run_steps import compute_total_steps
from hlat.model.decoder_spec import (
    compute_flops_per_token,
    count_active_parameters,
    count_parameters,
    list_parameter_specs,
)
from hlat.model.parameter_spec import ParameterRole
from hlat.study.index_file import RunList, load_run_list, resolve_columns
from hlat.study.power_law import Array
from hlat.study.run_filter import filter_runs
from hlat.study.run_record import RunRecord, get_number, is_run_dir, load_run_record
from hlat.study.run_row import format_column, get_value
from hlat.study.scaling_points import PointColumns, ScalingPoints
from hlat.study.study_points import get_metric

PARAMETERS = "parameters"
PARAMETERS_WITHOUT_EMBEDDING = "parameters_without_embedding"
RUN_COLUMNS = (PARAMETERS, PARAMETERS_WITHOUT_EMBEDDING, "active_parameters", "tokens", "flops")
"""Columns from the specification of the model and the length of the run."""
MAX_EPOCHS = 1.0
"""Epochs above which data is repeated. A second epoch is worth almost as much as new data, later
ones less (Muennighoff et al., arXiv 2305.16264), which a law of tokens does not describe."""


def load_run_points(
    directories: Sequence[Path],
    columns: PointColumns,
    where: str | None = None,
    with_repeated: bool = False,
) -> tuple[ScalingPoints, list[str]]:
    """Return the points of the finished runs below directories, and which runs are omitted.

    Copies of other runs are omitted, too.

    Args:
        directories: Run directories, or roots of runs.
        columns: Columns of `RUN_COLUMNS`; the metric is a column of `hlat runs`.
        where: Filter of `hlat runs`.
        with_repeated: Include runs that read a source more than once.

    Raises:
        ConfigError: There is no finished run, or a run lacks its configuration or the metric.
    """
    tokens, flops = columns.tokens or "tokens", columns.flops or "flops"
    for name in (columns.parameters, tokens, flops):
        if name not in RUN_COLUMNS:
            raise ConfigError(f"{name} is not a column of runs; use {', '.join(RUN_COLUMNS)}")
    loaded = [load_finished_runs(directory, where) for directory in directories]
    by_run = {row["run"]: row for runs, _ in loaded for row in _build_rows(runs, columns)}
    rows = [*by_run.values()]
    source = ", ".join(map(str, directories))
    if not rows:
        condition = "" if where is None else f" with {where}"
        raise ConfigError(f"{source} has no finished runs{condition}; `hlat runs` lists the states")
    table = {name: np.array([row[name] for row in rows]) for name in RUN_COLUMNS}
    other = PARAMETERS_WITHOUT_EMBEDDING if columns.parameters == PARAMETERS else PARAMETERS
    points = ScalingPoints(
        source=source,
        metric=columns.metric,
        names=[row["run"] for row in rows],
        parameters=table[columns.parameters],
        tokens=table[tokens],
        flops=table[flops],
        losses=np.array([row["metric"] for row in rows]),
        groups=[row["group"] for row in rows],
        other_parameters=table[other],
        other_name=other,
        epochs=np.array([row["epochs"] for row in rows]),
        accuracies=_get_accuracies(rows, columns.accuracy),
        accuracy_name=columns.accuracy or "",
        learning_rates=_get_known(rows, "learning_rate"),
        batch_tokens=_get_known(rows, "batch_tokens"),
    )
    num_unfinished = sum(num for _, num in loaded)
    notes = [f"omitted {num_unfinished:,} runs that have not finished"] if num_unfinished else []
    points, more_notes = _drop_repeated(points, with_repeated)
    return points, [*notes, *more_notes]


def build_run_values(model: ModelConfig, sequence_length: int, tokens: float) -> dict[str, float]:
    """Return the values of `RUN_COLUMNS` of a model that is trained on `tokens`."""
    specs = list_parameter_specs(model)
    embedding = sum(spec.numel for spec in specs if spec.role is ParameterRole.embedding)
    total = count_parameters(model)
    return {
        PARAMETERS: float(total),
        PARAMETERS_WITHOUT_EMBEDDING: float(total - embedding),
        "active_parameters": float(count_active_parameters(model)),
        "tokens": float(tokens),
        "flops": compute_flops_per_token(model, sequence_length) * tokens,
    }


def build_config_values(config: Config) -> dict[str, float]:
    """Return the values of `RUN_COLUMNS` of a run that is trained to its end."""
    tokens = count_tokens(compute_total_steps(config), config.batch)
    return build_run_values(config.model, config.batch.sequence_length, tokens)


def count_epochs(record: RunRecord) -> float:
    """Return the epochs of the most repeated source; NaN without a ledger."""
    totals: dict[str, float] = {}
    for stage in record.data_ledger:
        for name, entry in stage["sources"].items():
            totals[name] = totals.get(name, 0.0) + get_number(entry, "epochs")
    return max(totals.values(), default=math.nan)


def _get_accuracies(rows: Sequence[Mapping[str, Any]], name: str | None) -> Array | None:
    """Return the accuracies of runs; raise ConfigError for a run without."""
    if name is None:
        return None
    for row in rows:
        if math.isnan(row["accuracy"]):
            raise ConfigError(
                f"{row['run']} has no accuracy={name}; evaluate it, or omit it with where="
            )
    return np.array([row["accuracy"] for row in rows])


def _get_known(rows: Sequence[Mapping[str, Any]], name: str) -> Array | None:
    """Return a hyperparameter of runs; None if it is unknown or not positive for a run."""
    values = np.array([row[name] for row in rows])
    return values if (values > 0).all() else None


def _drop_repeated(points: ScalingPoints, with_repeated: bool) -> tuple[ScalingPoints, list[str]]:
    """Return the points without those of repeated data, unless requested, and a note."""
    assert points.epochs is not None, "runs have epochs"
    repeated = points.epochs > MAX_EPOCHS
    if not (count := int(repeated.sum())):
        return points, []
    epochs = float(np.nanmax(points.epochs))
    text = f"{count:,} runs that read a source more than once (up to {epochs:.3g} epochs)"
    if with_repeated:
        return points, [f"fitted with {text}"]
    return points.select(~repeated), [f"omitted {text}; repeated=true includes them"]


def load_finished_runs(directory: Path, where: str | None) -> tuple[RunList, int]:
    """Return the finished runs of a directory, and the number of others."""
    if is_run_dir(directory):
        runs = load_run_list(directory.parent)
        runs = runs.select(i for i, row in enumerate(runs.rows) if row["run"] == directory.name)
    else:
        runs = load_run_list(directory)
    runs = runs if where is None else filter_runs(runs, where)
    runs = runs.drop_copies()
    finished = [i for i, row in enumerate(runs.rows) if row["state"] == "finish"]
    return runs.select(finished), len(runs.rows) - len(finished)


def _build_rows(runs: RunList, columns: PointColumns) -> Iterable[dict[str, Any]]:
    """Yield name, `RUN_COLUMNS`, metric, group and epochs of each run."""
    if not runs.rows:
        return
    names = [columns.metric] if columns.group is None else [columns.metric, columns.group]
    metric, *group = resolve_columns(runs, names)
    for row, settings in zip(runs.rows, runs.settings, strict=True):
        path = runs.root / row["run"]
        record = load_run_record(path)
        model = record.model_settings
        if model is None:
            raise ConfigError(
                f"{path}/config.yaml cannot be parsed, so that its parameters are unknown; omit "
                "the run with where="
            )
        value = get_value(row, settings, metric)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(
                f"{path}: {metric}={value} is not a number above 0; omit the run with where=, or "
                "choose another metric="
            )
        yield {
            "run": str(path),
            "metric": float(value),
            "group": format_column(row, settings, group[0]) if group else str(path),
            "epochs": count_epochs(record),
            "accuracy": get_metric(record, columns.accuracy or ""),
            "learning_rate": get_number(dict(settings), "optimizer.lr"),
            "batch_tokens": float(model.batch.tokens_per_step),
            **build_run_values(model.model, model.batch.sequence_length, row.get("tokens", 0)),
        }
