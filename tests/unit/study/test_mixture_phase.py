"""Mixtures of a last phase: shares by integration, exponent, and the proposed weights and start."""

from dataclasses import replace

import numpy as np
import pytest

from hlat.config.config_errors import ConfigError
from hlat.study import mixture_analysis
from hlat.study.mixture_analysis import MixtureAnalysis, MixtureSettings, analyze_mixtures
from hlat.study.mixture_phase import write_proposal
from hlat.study.mixture_points import MixturePoints, compute_shares
from hlat.study.mixture_regression import MixtureForm
from hlat.study.mixture_text import format_mixtures
from hlat.study.phase_features import choose_exponent
from tests.unit.study.mixture_data import BASE, build_points
from tests.unit.study.test_mixture_proposal import list_simplex

EXPONENT = 4.0
OVER_RUN = np.array([[0.9, 0.2, -1.2], [0.5, -0.4, 0.1]])
"""Coefficients of the shares over the run in the log of the loss, of two domains."""
RECENT = np.array([[-1.4, 0.1, 0.6], [0.3, -0.9, 0.2]])
"""Coefficients of the recent shares: code of the last tokens reduces the loss on code."""
TARGET = np.array([0.5, 0.5])


@pytest.fixture(autouse=True)
def _without_trees(monkeypatch, request):
    """Omit LightGBM, whose cross-validation takes seconds, in tests of other forms."""
    if "trees" not in request.node.name:
        forms = [MixtureForm.linear, MixtureForm.log_linear]
        monkeypatch.setattr(mixture_analysis, "list_available_forms", lambda: forms)


def compute_phase_losses(weights, starts):
    """Return the losses [points, 2] of last phases."""
    over_run = compute_shares(weights, starts, BASE)
    recent = compute_shares(weights, starts, BASE, EXPONENT)
    return 0.8 + np.exp(over_run @ OVER_RUN.T + recent @ RECENT.T)


def build_phase_points(num_mixtures=60, noise=0.0, low=0.4, high=0.95, tokens=1e6) -> MixturePoints:
    """Return a base run and random last phases."""
    points = build_points(num_mixtures, tokens=tokens)
    generator = np.random.default_rng(1)
    weights = np.vstack([BASE, points.weights[1:]])
    starts = np.array([1.0, *np.round(generator.uniform(low, high, num_mixtures - 1), 2)])
    losses = compute_phase_losses(weights, starts)
    noisy = losses + generator.normal(0, noise, losses.shape)
    return replace(points, weights=weights, starts=starts, losses=noisy)


def analyze(points, form="log_linear", max_epochs=1e9, samples=5) -> MixtureAnalysis:
    settings = MixtureSettings({}, MixtureForm(form), max_epochs, None, samples, 0)
    return analyze_mixtures(points, settings)


@pytest.mark.parametrize("exponent", [1.0, 4.0])
def test_shares_are_the_mean_over_the_tokens(exponent):
    """The mean of the weights at a million tokens, with the weight of each token."""
    weights, starts = np.array([[0.7, 0.1, 0.2], [0.1, 0.1, 0.8]]), np.array([0.35, 0.9])
    times = (np.arange(10**6) + 0.5) / 10**6
    density = exponent * times ** (exponent - 1)
    for mixture, start, found in zip(
        weights, starts, compute_shares(weights, starts, BASE, exponent), strict=True
    ):
        after = density[times >= start].mean() * (times >= start).mean()
        np.testing.assert_allclose(found, after * mixture + (1 - after) * BASE, atol=1e-6)


def test_empty_phase_has_the_base_and_a_whole_one_its_weights():
    points = replace(build_phase_points(), exponent=EXPONENT)
    mixture = np.array([[0.2, 0.3, 0.5]])
    features = points.build_features(np.vstack([mixture, mixture]), np.array([0.0, 1.0]))
    np.testing.assert_array_equal(features[0], [0.2, 0.3, 0.5, 0.2, 0.3])
    np.testing.assert_array_equal(features[1], [*BASE, *BASE[:2]])


def test_exponent_of_the_losses_is_found():
    points = choose_exponent(build_phase_points(num_mixtures=120, noise=1e-4), TARGET)
    assert points.exponent == EXPONENT
    assert points.features.shape == (120, 5)


def test_order_without_an_effect_needs_no_recent_shares():
    points = build_phase_points()
    losses = 2 * np.exp(compute_shares(points.weights, points.starts, BASE) @ OVER_RUN.T)
    points = replace(points, losses=losses + np.random.default_rng(2).normal(0, 0.01, (60, 2)))
    analysis = analyze(points, samples=1)
    assert np.isnan(analysis.points.exponent)
    assert any("only the tokens of each source count" in text for text in analysis.warnings)


def test_mixtures_of_the_whole_run_are_unchanged():
    points = build_points(30)
    assert choose_exponent(points, TARGET) is points
    np.testing.assert_array_equal(points.features, points.weights)


def find_best(points) -> tuple[np.ndarray, float, float]:
    """Return the best weights, start and target of a grid within the sampled ones."""
    sampled = points.weights[points.has_phase]
    grid = list_simplex()
    inside = (grid >= sampled.min(0) - 1e-9) & (grid <= sampled.max(0) + 1e-9)
    grid = grid[inside.all(1)]
    starts = points.starts[points.has_phase]
    best = (grid[0], 0.0, np.inf)
    for start in np.arange(round(100 * starts.min()), round(100 * starts.max()) + 1) / 100:
        losses = compute_phase_losses(grid, np.full(len(grid), start)) @ TARGET
        if losses.min() < best[2]:
            best = grid[losses.argmin()], float(start), float(losses.min())
    return best


def test_proposal_is_the_minimum_of_a_grid_of_weights_and_starts():
    points = build_phase_points()
    analysis = analyze(points)
    weights, start, lowest = find_best(points)
    proposal = analysis.proposal
    found = compute_phase_losses(proposal.weights[None], np.array([proposal.start])) @ TARGET
    assert lowest - 2e-3 < found[0] < lowest + 2e-4  # the grid has steps of 0.005
    assert proposal.start == pytest.approx(start, abs=0.02)
    assert 0.42 < proposal.start < 0.9
    np.testing.assert_allclose(proposal.weights, weights, atol=0.03)
    base = compute_phase_losses(BASE[None], np.ones(1)) @ TARGET
    assert proposal.gain.value == pytest.approx(float((base - found)[0]), abs=1e-3)
    np.testing.assert_allclose(proposal.shares, start * BASE + (1 - start) * weights, atol=0.03)


def test_interval_contains_the_true_gain():
    points = build_phase_points(noise=0.01)
    proposal = analyze(points, samples=30).proposal
    pair = compute_phase_losses(np.stack([BASE, proposal.weights]), np.array([1.0, proposal.start]))
    gain = proposal.gain
    assert gain.low <= float((pair @ TARGET)[0] - (pair @ TARGET)[1]) <= gain.high


def test_epochs_limit_the_shares_over_the_run():
    """An epoch has 0.4 times the tokens of the run."""
    points = build_phase_points(low=0.1)
    free = analyze(points).proposal.shares
    assert free.max() > 0.43
    limited = analyze(points, max_epochs=1).proposal
    assert 0.39 < limited.shares.max() <= 0.4
    assert int(limited.shares.argmax()) in limited.find_limited()
    assert limited.weights.max() > 0.5


@pytest.mark.slow
def test_trees_propose_a_phase_near_the_minimum():
    points = build_phase_points(num_mixtures=120)
    proposal = analyze(points, "lightgbm", samples=1).proposal
    *_, lowest = find_best(points)
    found = compute_phase_losses(proposal.weights[None], np.array([proposal.start])) @ TARGET
    base = compute_phase_losses(BASE[None], np.ones(1)) @ TARGET
    assert lowest <= found < lowest + 0.5 * (base - lowest)


def test_equal_starts_are_a_warning():
    points = build_phase_points(low=0.7, high=0.7)
    analysis = analyze(points)
    assert analysis.proposal.start == 0.7
    assert any("the start is 0.70 in all runs" in text for text in analysis.warnings)


def test_proposal_is_a_phase_of_two_stages(tmp_path):
    analysis = analyze(build_phase_points())
    text = write_proposal(analysis, tmp_path).read_text()
    start = analysis.proposal.start
    assert f"# {start:g} of 1,000,000 tokens" in text
    assert f"- {{name: base, tokens: {round(start * 1e6)}}}" in text
    printed = "\n".join(format_mixtures(analysis))
    assert f"the proposal is for a last phase after {start:.2f} of the tokens" in printed
    assert "recent shares, of which the last 16% of the tokens are half" in printed
    assert "whole run" in printed


def test_few_mixtures_are_one_sentence():
    with pytest.raises(ConfigError, match="has 10 mixtures of 3 sources; train at least 12"):
        analyze(build_phase_points(num_mixtures=10))
