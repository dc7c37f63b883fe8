"""Decision accuracy and signal-to-noise ratio of metrics during training."""

import math
from itertools import combinations

import numpy as np
import pytest

from hlat.config.study import Direction, StudyConfig
from hlat.study.metric_reliability import (
    MetricReliability,
    analyze_reliability,
    build_reliability_table,
    compute_decision_accuracy,
    format_reliability_caption,
    list_trajectories,
)
from hlat.study.run_record import RunRecord

METRIC = "heldout_bits_per_byte"
DESIGN = StudyConfig(metric=METRIC)


def build_points(values, metric=METRIC):
    """Return points of one run each, given the values of each point at steps 10, 20 ..."""
    return [[{metric: {10 * (n + 1): v for n, v in enumerate(each)}}] for each in values]


def test_decision_accuracy_is_that_of_signal_and_noise():
    """The published function compares `>` over the upper triangle (allenai/signal-and-noise)."""
    generator = np.random.default_rng(0)
    for _ in range(20):
        early, late = generator.normal(size=(2, 7)).tolist()
        pairs = [*combinations(range(7), 2)]
        expected = np.mean([(early[i] > early[k]) == (late[i] > late[k]) for i, k in pairs])
        assert compute_decision_accuracy(early, late) == pytest.approx(expected, abs=1e-12)


def test_a_tie_is_a_wrong_decision_unless_both_are_equal():
    assert compute_decision_accuracy([1.0, 1.0, 2.0], [1.0, 1.5, 2.0]) == pytest.approx(2 / 3)
    assert compute_decision_accuracy([1.0, 1.0, 2.0], [3.0, 3.0, 4.0]) == 1


def test_the_first_reliable_step_needs_all_later_ones():
    # Orders of three points: right, two of three pairs, right, right
    points = build_points([(1, 2, 1, 1), (2, 1, 2, 2), (3, 3, 3, 3)])
    (result,) = analyze_reliability(points, DESIGN)
    assert result.accuracies == {10: 1, 20: pytest.approx(2 / 3), 30: 1, 40: 1}
    assert result.decides_from == 30
    caption = format_reliability_caption([result], DESIGN)
    assert caption.endswith("; earliest: heldout_bits_per_byte, from step 30 of 40")


def test_the_caption_has_all_metrics_that_decide_at_the_same_step():
    accuracies = {10: 1.0, 20: 1.0, 30: 1.0}
    names = {METRIC: 10, "scores.piqa": 10, "scores.arc_easy": 20}
    results = [MetricReliability(name, accuracies, step, 1.0) for name, step in names.items()]
    caption = format_reliability_caption(results, DESIGN)
    assert caption.endswith(f"; earliest: {METRIC}, scores.piqa, from step 10 of 30")


def test_metrics_with_the_opposite_direction_and_the_earliest_one_first():
    loss = [(3.0, 2.6, 2.2), (2.9, 2.7, 2.3), (3.1, 2.8, 2.4)]
    accuracy = [(0.4, 0.4, 0.5), (0.3, 0.3, 0.4), (0.2, 0.2, 0.3)]
    points = [
        [
            {
                METRIC: dict(zip((10, 20, 30), one, strict=True)),
                "scores.arc_easy": dict(zip((10, 20, 30), other, strict=True)),
            }
        ]
        for one, other in zip(loss, accuracy, strict=True)
    ]
    first, second = analyze_reliability(points, DESIGN)
    assert (first.metric, first.decides_from) == ("scores.arc_easy", 10)
    assert (second.metric, second.decides_from) == (METRIC, 20)
    by_score = StudyConfig(metric="scores.arc_easy", direction=Direction.maximize)
    assert [one.decides_from for one in analyze_reliability(points, by_score)] == [10, 20]


def test_means_over_runs_and_signal_to_noise():
    """Noise: alternating deviations of 0.1 have a standard deviation around the trend of 0.1633."""
    steps = range(10, 130, 10)
    deviations = [0.1 * (-1) ** n for n in range(12)]
    points = [
        [
            {METRIC: {s: level + shift + d for s, d in zip(steps, deviations, strict=True)}}
            for shift in (-0.2, 0.2)
        ]
        for level in (1.0, 2.0, 4.0)
    ]
    (result,) = analyze_reliability(points, DESIGN)
    noise = math.sqrt(0.2**2 * 2 / 3)
    assert result.signal_to_noise == pytest.approx(3 / noise, rel=1e-9)


@pytest.mark.parametrize(
    "points",
    [
        build_points([(1, 2, 3), (2, 3, 4)]),
        build_points([(1, 2), (2, 3), (3, 4)]),
        build_points([(1, 2, 3), (2, 3, 4), (3, 4, 5)], "scores.piqa"),
        [*build_points([(1, 2, 3), (2, 3, 4)]), []],
        [],
    ],
    ids=["two points", "two evaluations", "no metric of the study", "no finished run", "no point"],
)
def test_studies_without_enough_values(points):
    assert analyze_reliability(points, DESIGN) == []


def test_steps_and_metrics_that_a_run_lacks_are_omitted():
    points = build_points([(1, 2, 3, 3), (2, 3, 4, 4), (3, 4, 5, 5)])
    del points[1][0][METRIC][20]
    points[0][0]["scores.piqa"] = {10: 0.1, 20: 0.2, 30: 0.3}
    (result,) = analyze_reliability(points, DESIGN)
    assert [*result.accuracies] == [10, 30, 40]


def test_a_table_without_a_reliable_step():
    result = MetricReliability(METRIC, {10: 0.5, 20: 0.5, 30: 1.0}, None, math.nan)
    _, (row,) = build_reliability_table([result])
    assert row == [METRIC, "n/a", "50%", "50%", "n/a", "n/a"]
    assert "none reaches 90% before the end" in format_reliability_caption([result], DESIGN)


def test_trajectories_of_a_run():
    events = [
        {"event": "evaluate", "step": 0, "bits_per_byte": {"mean": 3.0, "code": 3.5}},
        {"event": "evaluate", "step": 5, "bits_per_byte": {"mean": 2.0, "code": math.inf}},
        {
            "event": "evaluate",
            "step": 9,
            "bits_per_byte": {"mean": 9.0},
            "loop": {"bits_per_byte": {"mean": 1.5, "code": 1.0}},
        },
        {"event": "score", "step": 9, "scores": {"piqa": 0.5}},
    ]
    record = RunRecord("run", [], events, "", {}, 0)
    assert list_trajectories(record) == {
        METRIC: {0: 3.0, 5: 2.0, 9: 1.5},
        f"{METRIC}.code": {0: 3.5, 9: 1.0},
        "scores.piqa": {9: 0.5},
    }
