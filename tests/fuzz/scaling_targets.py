"""Readers of scaling fits: points of CSV files, and registered predictions."""

import json
from pathlib import Path

from hlat.plan.scaling_law import load_law
from hlat.study.registered_prediction import build_prediction, compare_prediction
from hlat.study.run_record import load_run_record
from hlat.study.scaling_fit import FitSettings, fit_scaling_law
from hlat.study.scaling_points import (
    PointColumns,
    ScalingPoints,
    load_csv_points,
    validate_points,
)
from hlat.tracking.prediction_file import get_prediction_path
from tests.fuzz.data_targets import serialize_rows
from tests.fuzz.fuzzer import Target
from tests.fuzz.mutations import either, mutate_bytes, mutate_json, mutate_text
from tests.fuzz.run_targets import EVENT_ROWS, EVENTS, METRICS, ROW
from tests.unit.study.scaling_data import build_inputs, compute_losses

_POINTS, _LAW = "points.csv", "fit.json"
_COLUMNS = PointColumns("parameters", None, None, "loss", "loss")


def _build_points(_: Path) -> list[bytes]:
    inputs = build_inputs(3, 3)
    rows = zip(*inputs.tolist(), compute_losses(inputs).tolist(), strict=True)
    lines = ["parameters,tokens,loss", *(",".join(map(repr, row)) for row in rows)]
    return ["\n".join(lines).encode()]


def _read_points(directory: Path, content: bytes) -> object:
    file = directory / _POINTS
    file.write_bytes(content)
    points = load_csv_points(file, _COLUMNS)
    validate_points(points)
    return points


def _build_prediction(directory: Path) -> list[bytes]:
    """Write a run; return its prediction."""
    run_dir = directory / "x"
    run_dir.mkdir()
    (run_dir / METRICS).write_bytes(serialize_rows([ROW]))
    (run_dir / EVENTS).write_bytes(serialize_rows(EVENT_ROWS))
    inputs = build_inputs(3, 3)
    names = [str(i) for i in range(9)]
    values = (*inputs, 6 * inputs.prod(0), compute_losses(inputs))
    points = ScalingPoints("points", "final_loss", names, *values, names)
    fit = fit_scaling_law(points, FitSettings(num_samples=5))
    content = build_prediction(fit, fit.predict(1e9, 1e11), "parameters", 6e20, 1.0)
    return [json.dumps(content).encode()]


def _read_prediction(directory: Path, content: bytes) -> object:
    run_dir = directory / "x"
    get_prediction_path(run_dir).write_bytes(content)
    return compare_prediction(load_run_record(run_dir))


def _build_laws(_: Path) -> list[bytes]:
    points = {"E": 1.8, "A": 482.0, "alpha": 0.35, "B": 2085.0, "beta": 0.37}
    constants = {name: {"value": value, "low": None, "high": 1.0} for name, value in points.items()}
    law = {"constants": constants, "flops_per_parameter_and_token": 6.2}
    content = {"points": 9, "source": "runs", "law": law, "warnings": ["few points"]}
    return [json.dumps(content).encode()]


def _read_law(directory: Path, content: bytes) -> object:
    file = directory / _LAW
    file.write_bytes(content)
    return load_law(file).allocate(1e22)


TARGETS = [
    Target("scaling_law", _build_laws, _read_law, either(mutate_json, mutate_bytes), _LAW),
    Target(
        "scaling_points", _build_points, _read_points, either(mutate_text, mutate_bytes), _POINTS
    ),
    Target(
        "prediction",
        _build_prediction,
        _read_prediction,
        either(mutate_json, mutate_bytes),
        "x.prediction.json",
    ),
]
