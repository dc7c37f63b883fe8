"""Prediction of a run that is registered before it starts, and its comparison with the run."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlat.config.config_errors import ConfigError
from hlat.storage.durable_files import replace_file
from hlat.study.run_record import RunRecord, get_number
from hlat.study.scaling_fit import CONFIDENCE, Prediction, ScalingFit
from hlat.study.scaling_points import ScalingPoints
from hlat.study.scaling_runs import build_run_values
from hlat.study.scaling_text import summarize_fit, summarize_interval
from hlat.study.study_points import get_metric
from hlat.tracking.prediction_file import (
    DIGEST,
    PROVENANCE_KEY,
    compute_prediction_digest,
    get_prediction_path,
)
from hlat.tracking.text_format import format_count, format_decimal, format_table, format_timestamp

_SIZE_TOLERANCE = 1e-3
"""Relative difference of the tokens of a run and of its prediction, as of the last partial step."""


@dataclass(frozen=True)
class PredictionComparison:
    """Registered and measured loss of a run.

    Attributes:
        rows: Names and values.
        problems: Reasons for which the prediction does not count.
    """

    rows: list[tuple[str, str]]
    problems: list[str]


def build_prediction(
    fit: ScalingFit, prediction: Prediction, column: str, flops: float, registered: float
) -> dict[str, Any]:
    """Return the content of the file.

    Args:
        fit: Fit that predicts.
        prediction: Loss of the run.
        column: Column of `hlat.study.scaling_runs.RUN_COLUMNS` that counts the parameters.
        flops: FLOPs of the run.
        registered: Unix time.
    """
    fields = {
        "registered": registered,
        "metric": fit.points.metric,
        "parameters_column": column,
        "parameters": prediction.parameters,
        "tokens": prediction.tokens,
        "flops": flops,
        "confidence": CONFIDENCE,
        "prediction": summarize_interval(prediction.run),
        "curve": summarize_interval(prediction.curve),
        "fit": summarize_fit(fit),
        "warnings": fit.list_warnings([flops]),
        "inputs": {
            "source": fit.points.source,
            "points": len(fit.points),
            "sha256": compute_points_digest(fit.points),
        },
    }
    return {**fields, DIGEST: compute_prediction_digest(fields)}


def save_prediction(run_dir: Path, content: Mapping[str, Any]) -> Path:
    """Write the prediction of a run; return the file.

    Raises:
        ConfigError: The run has a prediction.
    """
    file = get_prediction_path(run_dir)
    if file.exists():
        raise ConfigError(f"{file} exists; remove it to register another prediction of this run")
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())
    return file


def compute_points_digest(points: ScalingPoints) -> str:
    """Return a digest of parameters, tokens, FLOPs and losses of all points in their order."""
    columns = (points.parameters, points.tokens, points.flops, points.losses)
    return hashlib.sha256(json.dumps([each.tolist() for each in columns]).encode()).hexdigest()


def compare_prediction(record: RunRecord) -> PredictionComparison | None:
    """Return the comparison of a run with its registered prediction; None without one."""
    content = record.prediction
    if not content:
        return None
    intervals = content.get("prediction")
    interval: dict[str, Any] = intervals if isinstance(intervals, dict) else {}
    value, low, high = (get_number(interval, key) for key in ("value", "low", "high"))
    measured = get_metric(record, str(content.get("metric")))
    is_within = low <= measured <= high
    verdict = "" if math.isnan(measured) else "within" if is_within else "outside of"
    confidence = get_number(content, "confidence")
    rows = [
        ("Metric", str(content.get("metric"))),
        ("Registered", format_timestamp(get_number(content, "registered"))),
        ("Predicted", format_decimal(value)),
        (f"{confidence:.0%} interval", f"{format_decimal(low)} to {format_decimal(high)}"),
        ("Measured", format_decimal(measured)),
    ]
    if verdict:
        error = f"{100 * (measured / value - 1):+.2f} %, {verdict} the interval"
        rows.append(("Measured less predicted", error))
    return PredictionComparison(rows, [*_find_problems(record, content)])


def format_comparison(record: RunRecord) -> list[str]:
    """Return the comparison of a run with its prediction for a terminal; empty without one."""
    comparison = compare_prediction(record)
    if comparison is None:
        return []
    table = format_table(["Registered prediction", ""], comparison.rows)
    return [*table, *(f"WARNING: not a valid prediction: {each}" for each in comparison.problems)]


def _find_problems(record: RunRecord, content: Mapping[str, Any]) -> Iterator[str]:
    digest = compute_prediction_digest(content)
    if content.get(DIGEST) != digest:
        yield "the file was changed: its digest is not that of its content"
    registered = get_number(dict(content), "registered")
    if record.start_time < registered:
        yield (
            f"the run started on {format_timestamp(record.start_time)}, before the prediction was "
            f"registered on {format_timestamp(registered)}"
        )
    recorded = record.provenance.get(PROVENANCE_KEY)
    if recorded is None:
        yield "the run recorded no prediction when it started"
    elif recorded != digest:
        yield "the run recorded another prediction when it started"
    yield from _find_differences(record, content)


def _find_differences(record: RunRecord, content: Mapping[str, Any]) -> Iterator[str]:
    """Yield where the run is not that of the prediction."""
    settings = record.model_settings
    if settings is None:
        return
    tokens = max(record.get_finite_values("tokens").tolist(), default=math.nan)
    values = build_run_values(settings.model, settings.batch.sequence_length, tokens)
    names = {"parameters": str(content.get("parameters_column")), "tokens": "tokens"}
    for key, column in names.items():
        planned, measured = get_number(dict(content), key), values.get(column, math.nan)
        if abs(measured - planned) > _SIZE_TOLERANCE * planned:
            yield (
                f"the run has {format_count(measured)} {key}, and the prediction is for "
                f"{format_count(planned)}"
            )
