"""Proposed mixtures: minimum by brute force, limits, edges, gain and its interval."""

import numpy as np
import pytest

from hlat.config.config_errors import ConfigError
from hlat.study.mixture_analysis import MixtureAnalysis, MixtureSettings, analyze_mixtures
from hlat.study.mixture_regression import MixtureForm
from tests.unit.study.mixture_data import BASE, build_points, compute_losses

STEP = 0.005


def analyze(points, form="log_linear", target=None, max_epochs=1e9, **settings) -> MixtureAnalysis:
    values = {"tokens": None, "num_samples": 20, "seed": 0} | settings
    form = None if form is None else MixtureForm(form)
    return analyze_mixtures(points, MixtureSettings(target or {}, form, max_epochs, **values))


def list_simplex() -> np.ndarray:
    """Return all mixtures of three sources in steps of `STEP`."""
    steps = np.arange(0, 1 + STEP / 2, STEP)
    first, second = np.meshgrid(steps, steps)
    grid = np.stack([first, second, 1 - first - second], -1).reshape(-1, 3)
    return grid[grid[:, 2] >= -1e-9]


def find_best(points, target: np.ndarray, limit: float = 1.0) -> np.ndarray:
    """Return the best mixture of the grid within the sampled weights and a limit."""
    grid = list_simplex()
    high = np.minimum(points.weights.max(0), limit)
    grid = grid[(grid >= points.weights.min(0) - 1e-9).all(1) & (grid <= high + 1e-9).all(1)]
    return grid[(compute_losses(grid) @ target).argmin()]


@pytest.mark.parametrize("target", [{}, {"code": 1}, {"code": 1, "data": 3}])
def test_proposal_is_the_minimum_of_a_grid(target: dict[str, float]) -> None:
    points = build_points(num_mixtures=30)
    analysis = analyze(points, target=target)
    expected = find_best(points, analysis.target)
    best = compute_losses(expected[None]) @ analysis.target
    found = compute_losses(analysis.proposal.weights[None]) @ analysis.target
    np.testing.assert_allclose(analysis.proposal.weights, expected, atol=3 * STEP)
    assert found <= best + 1e-4
    gain = compute_losses(BASE[None]) @ analysis.target - found
    assert analysis.proposal.gain.value == pytest.approx(float(gain[0]), abs=1e-6)


def test_proposal_is_within_the_epochs() -> None:
    """An epoch has 0.4 times the tokens of a run, so that 1.25 epochs are half of its tokens."""
    points = build_points(num_mixtures=30)
    analysis = analyze(points, target={"code": 1}, max_epochs=1.25)
    weights = analysis.proposal.weights
    assert 0.49 < weights.max() <= 0.5
    assert int(weights.argmax()) in analysis.proposal.find_limited()
    np.testing.assert_allclose(weights, find_best(points, analysis.target, 0.5), atol=3 * STEP)
    longer = analyze(points, target={"code": 1}, max_epochs=2.5, tokens=2e6)
    np.testing.assert_allclose(longer.proposal.weights, weights, atol=1e-3)


def test_edge_of_the_sampled_weights_is_flagged() -> None:
    points = build_points(num_mixtures=30)
    analysis = analyze(points, target={"code": 1})
    edges = [points.sources[index] for index in analysis.proposal.find_edges()]
    assert "code" in edges
    assert any("edge of the sampled weights of code" in text for text in analysis.warnings)


def test_trees_propose_a_mixture_near_the_minimum() -> None:
    points = build_points(num_mixtures=150, noise=0.002)
    analysis = analyze(points, "lightgbm", num_samples=2)
    best = float((compute_losses(find_best(points, analysis.target)[None]) @ analysis.target)[0])
    found = float((compute_losses(analysis.proposal.weights[None]) @ analysis.target)[0])
    base = float((compute_losses(BASE[None]) @ analysis.target)[0])
    assert best <= found < best + 0.2 * (base - best)


def test_interval_contains_the_true_gain() -> None:
    points = build_points(num_mixtures=40, num_seeds=2, noise=0.02)
    analysis = analyze(points, num_samples=100)
    pair = compute_losses(np.stack([BASE, analysis.proposal.weights])) @ analysis.target
    gain = analysis.proposal.gain
    assert gain.low <= pair[0] - pair[1] <= gain.high
    assert gain.high - gain.low < 0.1


def test_form_has_the_lowest_error_of_the_held_out_sets() -> None:
    points = build_points(num_mixtures=20, noise=1e-3)
    analysis = analyze(points, None)
    errors = {score.form: score.error for score in analysis.scores}
    assert analysis.proposal.form is MixtureForm.log_linear
    assert errors[MixtureForm.log_linear] < 0.003 < errors[MixtureForm.linear]


def test_losses_without_a_relation_to_the_mixture_are_flagged() -> None:
    points = build_points(num_mixtures=20, noise=50.0)
    points.losses[:] = 100 + np.random.default_rng(3).normal(0, 1, points.losses.shape)
    analysis = analyze(points, "linear")
    assert any("does not explain the target" in text for text in analysis.warnings)


@pytest.mark.parametrize(
    ("num_mixtures", "settings", "problem"),
    [
        (2, {}, "has 2 mixtures of 3 sources; train at least 8"),
        (
            20,
            {"target": {"cod": 1}},
            "target: cod is no held-out set of the points; use code, data",
        ),
        (20, {"target": {"code": 0}}, "target has no weight above 0"),
        (20, {"max_epochs": 0.1}, "no sampled mixture reads every source at most max_epochs=0.1"),
    ],
)
def test_wrong_input_is_one_sentence(num_mixtures: int, settings: dict, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        analyze(build_points(num_mixtures), **settings)
    assert problem in str(error.value)
    assert len(error.value.problems) == 1
