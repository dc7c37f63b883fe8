"""Which points are compared, and the verdicts in words."""

import numpy as np
import pytest

from hlat.config.study import Direction, StudyConfig
from hlat.study.paired_test import PointRuns
from hlat.study.power import compute_required_seeds
from hlat.study.study_analysis import (
    Verdict,
    analyze_study,
    find_baselines,
    format_answer,
    format_point_pair,
    format_verdict,
)

LOW, HIGH = (("lr", "1"),), (("lr", "2"),)
SEEDS = [str(seed) for seed in range(1, 7)]


def _runs(values: list[float], diverged: tuple[str, ...] = ()) -> PointRuns:
    seeds = [seed for seed in SEEDS if seed not in diverged]
    return PointRuns(dict(zip(seeds, values, strict=False)), frozenset(diverged))


def test_a_point_is_compared_within_the_factors_that_the_baseline_omits() -> None:
    grid = [(("p", p), ("b", b)) for p in ("x", "y") for b in ("1", "2")]
    assert find_baselines(grid, {"b": "1"}) == [(grid[1], grid[0]), (grid[3], grid[2])]
    assert find_baselines(grid, {}) == [(grid[1], grid[0]), (grid[3], grid[2])]
    assert find_baselines(grid, {"p": "x", "b": "1"}) == [(point, grid[0]) for point in grid[1:]]
    assert find_baselines(grid[1:], {"b": "1"}) == [(grid[3], grid[2])]
    assert format_point_pair(grid[3], grid[2]) == "b=2 - b=1 (p=y)"


@pytest.mark.parametrize(
    ("direction", "verdict"), [(Direction.minimize, "better"), (Direction.maximize, "worse")]
)
def test_a_supported_difference_is_better_or_worse(direction: Direction, verdict: str) -> None:
    points = {LOW: _runs([2.0, 2.1, 2.3, 2.2]), HIGH: _runs([1.9, 2.01, 2.19, 2.11])}
    (found,) = analyze_study(points, StudyConfig(direction=direction))
    assert found.verdict.value == verdict
    assert format_verdict(found, StudyConfig()) == verdict
    assert format_answer(found, StudyConfig()) == f"lr=2 is {verdict} than lr=1"


def test_unsupported_verdict_contains_the_missing_seeds() -> None:
    points = {LOW: _runs([2.0, 2.1, 2.3]), HIGH: _runs([1.9, 2.15, 2.2])}
    design = StudyConfig(smallest_difference=0.05)
    (found,) = analyze_study(points, design)
    std = float(np.std([-0.1, 0.05, -0.1], ddof=1))
    required = compute_required_seeds(0.05, std)
    assert required is not None
    missing = required - 3
    expected = f"not decided: {missing} more seeds would detect a difference of 0.05"
    assert format_verdict(found, design) == expected
    assert format_answer(found, design) == (
        f"the seeds do not decide between lr=2 and lr=1: {missing} more seeds would detect a "
        "difference of 0.05"
    )


def test_a_difference_within_the_margin_counts_as_none() -> None:
    points = {LOW: _runs([2.0, 2.1, 2.3, 2.2]), HIGH: _runs([2.001, 2.099, 2.301, 2.199])}
    design = StudyConfig(smallest_difference=0.01)
    (found,) = analyze_study(points, design)
    assert found.verdict is Verdict.equal
    assert format_verdict(found, design) == "no difference of 0.01 or more"


def test_diverged_runs_prevent_a_win_and_can_decide() -> None:
    better = _runs([1.5, 1.6, 1.55, 1.52], diverged=("1", "2"))
    (found,) = analyze_study({LOW: _runs([2.0] * 6), HIGH: better}, StudyConfig())
    assert found.verdict is Verdict.undecided
    assert "; diverged with 2 seeds, the baseline with 0" in format_verdict(found, StudyConfig())
    (found,) = analyze_study(
        {LOW: _runs([2.0] * 6), HIGH: _runs([], diverged=tuple(SEEDS))}, StudyConfig()
    )
    assert found.verdict is Verdict.worse


def test_one_seed_is_not_enough() -> None:
    (found,) = analyze_study({LOW: _runs([2.0]), HIGH: _runs([1.0])}, StudyConfig())
    expected = "not decided: a test needs 1 more seed with the baseline"
    assert format_verdict(found, StudyConfig()) == expected


def test_verdict_of_too_few_diverged_seeds_contains_the_missing_ones() -> None:
    """Use five of five diverged runs, with a p-value of 1/16 in a rank test."""
    points = {LOW: _runs([2.0] * 5), HIGH: _runs([], diverged=tuple(SEEDS[:5]))}
    (found,) = analyze_study(points, StudyConfig())
    assert found.difference.p_value == pytest.approx(1 / 16)
    expected = "not decided: a test needs 1 more seed with the baseline; diverged with 5 seeds"
    assert format_verdict(found, StudyConfig()).startswith(expected)


def test_several_comparisons_are_corrected() -> None:
    """Compare points that do not differ; an uncorrected test finds one of 20."""
    generator = np.random.default_rng(10)
    points = {(("lr", str(i)),): _runs(list(generator.normal(2, 1, 6))) for i in range(30)}
    found = analyze_study(points, StudyConfig())
    assert any(one.difference.p_value < 0.05 for one in found)
    assert not any(one.verdict is not Verdict.undecided for one in found)


def test_equal_differences_with_a_diverged_run_are_not_decided() -> None:
    points = {LOW: _runs([2.0, 2.0, 2.0]), HIGH: _runs([1.0, 1.0], diverged=("3",))}
    (found,) = analyze_study(points, StudyConfig(smallest_difference=0.1))
    assert (found.verdict, found.num_more_seeds) == (Verdict.undecided, 1)
