"""Curves and how they are thinned."""

import math

import numpy as np

from hlat.report.report_writer import build_run_facts
from hlat.study.metric_curves import (
    MAX_POINTS_PER_CURVE,
    Curve,
    build_average_curves,
    build_data_wait_curve,
    build_heldout_curves,
    build_metric_curve,
    compute_max_points,
    downsample_min_max,
    locate_marks,
)
from hlat.study.run_record import RunRecord


def make_record(metrics: list[dict[str, object]], events: list[dict[str, object]]) -> RunRecord:
    return RunRecord("run", metrics, events, "", {}, 0)


def make_curve(values: list[float]) -> Curve:
    places = np.arange(len(values), dtype=np.float64)
    return Curve("loss", places, np.array(values), places, places)


def test_short_curves_are_not_thinned() -> None:
    curve = make_curve([1.0] * MAX_POINTS_PER_CURVE)
    assert downsample_min_max(curve) is curve


def test_thinning_preserves_peaks_and_order() -> None:
    values = np.random.default_rng(0).normal(size=123_457)
    values[[0, 777, 123_456]] = [50, -50, 60]
    thinned = downsample_min_max(make_curve(list(values)))
    assert len(thinned.values) <= MAX_POINTS_PER_CURVE
    assert {50.0, -50.0, 60.0} <= set(thinned.values)
    assert (np.diff(thinned.tokens) > 0).all()
    assert (values[thinned.tokens.astype(int)] == thinned.values).all()


def test_thinning_preserves_gaps() -> None:
    values = [1.0] * 10_000 + [math.nan] * 10_000 + [2.0] * 10_000
    assert np.isnan(downsample_min_max(make_curve(values)).values).sum() > 300


def test_each_of_very_many_curves_has_a_window() -> None:
    curve = make_curve([1.0, 5.0, -3.0, 2.0])
    thinned = downsample_min_max(curve, compute_max_points(11_000))
    assert list(thinned.values) == [5.0, -3.0]


def test_missing_and_infinite_values_become_gaps() -> None:
    rows: list[dict[str, object]] = [
        {"tokens": 1, "loss": 2.0},
        {"tokens": 2},
        {"tokens": 3, "loss": None},
        {"tokens": 4, "loss": math.inf},
    ]
    curve = build_metric_curve(make_record(rows, []), "loss")
    assert curve.values[0] == 2.0
    assert np.isnan(curve.values[1:]).all()


def test_data_wait_is_a_fraction_of_the_step() -> None:
    rows: list[dict[str, object]] = [
        {"tokens": 1, "step_seconds": 2.0, "data_wait_seconds": 0.5},
        {"tokens": 2, "step_seconds": 0.0, "data_wait_seconds": 0.0},
    ]
    values = build_data_wait_curve(make_record(rows, [])).values
    assert values[0] == 25
    assert np.isnan(values[1])


def test_evaluations_are_at_their_tokens_and_the_last_of_a_step_counts() -> None:
    events: list[dict[str, object]] = [
        {"event": "evaluate", "step": 0, "bits_per_byte": {"a": 4.0, "mean": 4.5, "z": 5.0}},
        {"event": "evaluate", "step": 6, "bits_per_byte": {"a": 9.0}},
        {"event": "resume", "step": 3},
        {"event": "evaluate", "step": 3, "bits_per_byte": {"a": 3.0}},
        {"event": "evaluate", "step": 6, "bits_per_byte": {"a": 2.0}},
    ]
    record = make_record([{"step": 2, "tokens": 20}], events)
    curves = {curve.label: curve for curve in build_heldout_curves(record)}
    assert list(curves) == ["a", "z", "mean"]
    assert curves["a"].tokens.tolist() == [0, 30, 60]
    assert curves["a"].values.tolist() == [4, 3, 2]
    assert curves["mean"].values.tolist() == [4.5]
    assert locate_marks(record)["resumed"].tokens.tolist() == [30]


def test_the_curve_of_the_moving_average_has_the_text_of_earlier_evaluations() -> None:
    averages = [
        {"bits_per_byte": {"a": 4.0, "mean": 4.0}},
        {"bits_per_byte": {"mean": 9.0}, "loop": {"bits_per_byte": {"a": 2.0, "mean": 2.0}}},
    ]
    events: list[dict[str, object]] = [
        {"event": "evaluate", "step": step, "bits_per_byte": {"a": 5.0}, "ema": ema}
        for step, ema in zip((0, 3), averages, strict=True)
    ]
    (curve,) = build_average_curves(make_record([{"step": 3, "tokens": 30}], events))
    assert curve.label == "mean, moving average"
    assert curve.values.tolist() == [4, 2]
    assert curve.tokens.tolist() == [0, 30]
    del events[0]["ema"], events[1]["ema"]
    assert build_average_curves(make_record([{"step": 3, "tokens": 30}], events)) == []


def test_a_change_of_settings_is_marked() -> None:
    changed = ["optimizer.lr was 0.1, is 0.2", "precision.name was fp32, is mixed"]
    events: list[dict[str, object]] = [
        {"event": "resume", "step": 2},
        {
            "event": "resume",
            "step": 4,
            "changed": [*changed, "precision.param_dtype was fp32, is bf16"],
        },
        {"event": "resume", "step": 5, "changed": "damaged"},
    ]
    record = make_record([{"step": 2, "tokens": 20}], events)
    assert locate_marks(record)["changed"].tokens.tolist() == [40]
    assert record.setting_changes == {4: changed}
    assert build_run_facts(record)[-1] == ("Changed at step 4", "; ".join(changed))
