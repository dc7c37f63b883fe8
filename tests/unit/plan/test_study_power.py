"""Seeds that a smallest difference needs, and what a budget can decide."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hlat.config.resolve import resolve_config
from hlat.config.study import StudyConfig
from hlat.plan.study_power import (
    count_comparisons,
    format_required_seeds,
    format_undecidable,
    plan_power,
)
from hlat.study.power import compute_detectable_difference, compute_required_seeds
from hlat.study.sequential_test import compute_sequential_detectable_difference

SPREAD = 0.012


def test_required_seeds_are_those_of_the_power_function() -> None:
    for wanted in (0.005, 0.01, 0.05):
        design = StudyConfig(smallest_difference=wanted)
        found = plan_power(design, SPREAD, 3, num_comparisons=2)
        assert found.num_required == compute_required_seeds(wanted, SPREAD, 0.025)
        assert found.num_affordable is None
    assert plan_power(StudyConfig(smallest_difference=1e-6), SPREAD, 3, 1).num_required is None
    assert plan_power(StudyConfig(), SPREAD, 3, 1).num_required is None


def test_seeds_of_a_sequential_study_detect_the_difference() -> None:
    design = StudyConfig(smallest_difference=0.02, stop_worse=True)
    required = plan_power(design, SPREAD, 3, 1).num_required
    assert required is not None
    detect = compute_sequential_detectable_difference
    assert detect(SPREAD, required) <= 0.02 < detect(SPREAD, required - 1)


def test_a_budget_decides_or_states_what_it_detects() -> None:
    """Three seeds take three hours, so that a budget of 12.5 hours has 12 seeds."""
    design = StudyConfig(smallest_difference=0.01, budget_hours=12.5)
    power = plan_power(design, SPREAD, 3, num_comparisons=1, hours=3.0)
    assert (power.num_required, power.num_affordable) == (14, 12)
    lines = format_required_seeds(design, power, 1.0)
    assert lines[0] == "study.smallest_difference=0.01 needs 14 seeds, 14 h 0 min in all"
    detected = compute_detectable_difference(SPREAD, 12)
    assert lines[1] == (
        f"NOT DECIDABLE within study.budget_hours=12.5, which has 12 seeds and detects {detected:.2g}"
    )
    larger = StudyConfig(smallest_difference=0.01, budget_hours=14)
    power = plan_power(larger, SPREAD, 3, num_comparisons=1, hours=3.0)
    (line,) = format_required_seeds(larger, power, 1.0)
    assert line.endswith("; study.budget_hours=14 has 14")
    small = StudyConfig(smallest_difference=0.01, budget_hours=1)
    power = plan_power(small, SPREAD, 3, num_comparisons=1, hours=3.0)
    assert format_required_seeds(small, power, 1.0)[1].endswith("which has 1 seed")
    assert format_required_seeds(StudyConfig(), power, 1.0) == []


def test_settings_over_rates_are_compared_by_two_criteria(compose: Callable[..., Any]) -> None:
    config = resolve_config(compose("+sweep=qk_norm"))
    points = [
        {"run.seed": seed, "model.attention.qk_norm": value, "optimizer.lr": rate}
        for seed in ("1", "2")
        for value in ("false", "true")
        for rate in ("1e-3", "2e-3")
    ]
    assert count_comparisons(points, [config] * len(points)) == 2
    without = resolve_config(compose("+sweep=tune_lr"))
    assert count_comparisons(points, [without] * len(points)) == 0


def test_a_sweep_states_before_it_runs_what_it_cannot_decide(compose: Callable[..., Any]) -> None:
    base = ("+study.baseline={optimizer.beta2: 0.95}", "study.smallest_difference=0.01")
    config = resolve_config(compose(*base, f"study.spread={SPREAD}"))
    points = [
        {"run.seed": str(seed), "optimizer.beta2": beta2}
        for seed in range(5)
        for beta2 in ("0.95", "0.99")
    ]
    configs = [config] * len(points)
    sentence = format_undecidable(points, configs)
    assert sentence == (
        f"5 seeds detect a difference of {compute_detectable_difference(SPREAD, 5):.2g} with 80% "
        "power; study.smallest_difference=0.01 needs 14"
    )
    more = [{**point, "run.seed": f"{n}"} for n in range(14) for point in points[:2]]
    assert format_undecidable(more, [config] * len(more)) is None
    assert format_undecidable(points, [resolve_config(compose())] * len(points)) is None


@pytest.mark.slow
def test_the_required_seeds_have_the_planned_power() -> None:
    """Simulate studies with the planned number of seeds and the smallest difference."""
    from hlat.study.paired_test import PointRuns, compare_paired

    design = StudyConfig(smallest_difference=0.01)
    required = plan_power(design, SPREAD, 3, 1).num_required
    assert required is not None
    generator = np.random.default_rng(5)
    found = 0
    for _ in range(2000):
        differences = generator.normal(0.01, SPREAD, required)
        runs = {str(n): float(value) for n, value in enumerate(differences)}
        baseline = PointRuns(dict.fromkeys(runs, 0.0))
        found += compare_paired(PointRuns(runs), baseline).p_value < design.alpha
    error = math.sqrt(0.8 * 0.2 / 2000)
    assert 0.8 - 4 * error < found / 2000 < 0.83 + 4 * error
