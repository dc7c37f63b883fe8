"""Predictions that are registered before a run, and their comparison with it."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hlat.config.compose import compose_config
from hlat.config.config_errors import ConfigError
from hlat.config.resolve import resolve_config
from hlat.study.registered_prediction import (
    PredictionComparison,
    build_prediction,
    compare_prediction,
    save_prediction,
)
from hlat.study.run_record import load_run_record
from hlat.study.scaling_fit import FitSettings, ScalingFit, fit_scaling_law
from hlat.study.scaling_points import PointColumns
from hlat.study.scaling_runs import build_config_values, load_run_points
from hlat.tracking.prediction_file import build_prediction_provenance, get_prediction_path
from tests.unit.study.scaling_data import write_run, write_runs

OVERRIDES = ["model=tiny", "model.hidden_size=512", "run.name=large"]
TOKENS = 10**10
STARTED = 999.0
"""Time of the runs of `write_run`."""


@pytest.fixture(scope="module")
def fit(tmp_path_factory: pytest.TempPathFactory) -> ScalingFit:
    root = tmp_path_factory.mktemp("prediction") / "runs"
    write_runs(root)
    columns = PointColumns("parameters", None, None, "heldout_bits_per_byte")
    return fit_scaling_law(load_run_points([root], columns)[0], FitSettings(num_samples=50))


def register(fit: ScalingFit, run_dir: Path, time: float = STARTED - 1) -> dict[str, object]:
    values = build_config_values(resolve_config(compose_config(OVERRIDES)))
    prediction = fit.predict(values["parameters"], TOKENS)
    content = build_prediction(fit, prediction, "parameters", values["flops"], time)
    save_prediction(run_dir, content)
    return content


def train(run_dir: Path, bits: float, tokens: int = TOKENS, provenance: object = None) -> None:
    config = OmegaConf.to_yaml(compose_config(OVERRIDES))
    recorded = build_prediction_provenance(run_dir) if provenance is None else provenance
    write_run(run_dir, config, tokens, bits, 0.5)
    (run_dir / "provenance.json").write_text(json.dumps(recorded))


def compare(run_dir: Path) -> PredictionComparison:
    comparison = compare_prediction(load_run_record(run_dir))
    assert comparison is not None
    return comparison


def test_run_is_compared_with_its_prediction(fit: ScalingFit, tmp_path: Path) -> None:
    run_dir = tmp_path / "large"
    content = register(fit, run_dir)
    predicted = content["prediction"]
    train(run_dir, predicted["value"] * 1.0001)
    comparison = compare(run_dir)
    assert comparison.problems == []
    rows = dict(comparison.rows)
    assert rows["Predicted"] == f"{predicted['value']:.3f}"
    assert rows["95% interval"] == f"{predicted['low']:.3f} to {predicted['high']:.3f}"
    assert rows["Measured less predicted"] == "+0.01 %, within the interval"


def test_run_outside_of_the_interval(fit: ScalingFit, tmp_path: Path) -> None:
    content = register(fit, tmp_path / "large")
    train(tmp_path / "large", content["prediction"]["high"] * 1.1)
    rows = dict(compare(tmp_path / "large").rows)
    assert rows["Measured less predicted"].endswith("outside of the interval")


def test_run_without_prediction_has_no_comparison(tmp_path: Path) -> None:
    train(tmp_path / "large", 3.0)
    assert compare_prediction(load_run_record(tmp_path / "large")) is None


def test_changed_prediction_is_flagged(fit: ScalingFit, tmp_path: Path) -> None:
    run_dir = tmp_path / "large"
    content = register(fit, run_dir)
    train(run_dir, 3.0)
    content["prediction"]["value"] = 3.0
    get_prediction_path(run_dir).write_text(json.dumps(content))
    assert compare(run_dir).problems == [
        "the file was changed: its digest is not that of its content",
        "the run recorded another prediction when it started",
    ]


def test_replaced_prediction_is_flagged(fit: ScalingFit, tmp_path: Path) -> None:
    run_dir = tmp_path / "large"
    register(fit, run_dir)
    train(run_dir, 3.0)
    get_prediction_path(run_dir).unlink()
    register(fit, run_dir, STARTED - 0.5)
    assert compare(run_dir).problems == ["the run recorded another prediction when it started"]


def test_prediction_after_the_start_is_flagged(fit: ScalingFit, tmp_path: Path) -> None:
    run_dir = tmp_path / "large"
    train(run_dir, 3.0)
    register(fit, run_dir, STARTED + 60)
    assert compare(run_dir).problems == [
        "the run started on 1970-01-01 00:16:39, before the prediction was registered on "
        "1970-01-01 00:17:39",
        "the run recorded no prediction when it started",
    ]


def test_other_run_is_flagged(fit: ScalingFit, tmp_path: Path) -> None:
    register(fit, tmp_path / "large")
    train(tmp_path / "large", 3.0, tokens=TOKENS // 2)
    assert compare(tmp_path / "large").problems == [
        "the run has 5,000,000,000 tokens, and the prediction is for 10,000,000,000"
    ]


def test_prediction_is_not_replaced(fit: ScalingFit, tmp_path: Path) -> None:
    register(fit, tmp_path / "large")
    with pytest.raises(ConfigError, match="remove it to register another prediction of this run"):
        register(fit, tmp_path / "large")


def test_later_attempts_have_the_prediction_of_the_first(fit: ScalingFit, tmp_path: Path) -> None:
    run_dir = tmp_path / "large"
    train(run_dir, 3.0)
    register(fit, run_dir)
    assert build_prediction_provenance(run_dir) == {"prediction": None}
