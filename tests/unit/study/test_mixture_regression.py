"""Regressions on mixtures: RegMix's published models, recovered constants and cross-validation."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from hlat.study import mixture_regression
from hlat.study.mixture_points import MixturePoints, load_csv_mixtures
from hlat.study.mixture_regression import (
    MixtureForm,
    cross_validate,
    fit_domains,
    fit_regression,
)
from tests.unit.study.mixture_data import CONSTANTS, build_points, compute_losses

REGMIX = Path(__file__).parents[2] / "data/regmix"
PUBLISHED = {
    "arxiv": 99.6,
    "freelaw": 99.71,
    "pubmed_central": 99.08,
    "wikipedia_en": 99.45,
    "dm_mathematics": 97.2,
    "github": 99.77,
    "stackexchange": 99.73,
    "gutenberg_pg_19": 99.18,
    "pile_cc": 98.92,
    "ubuntu_irc": 96.87,
    "hackernews": 98.51,
    "pubmed_abstracts": 99.19,
    "uspto_backgrounds": 99.12,
}
"""Rank correlations in regression_fitting/regression.ipynb of sail-sg/regmix at b004d3a."""


def load_regmix(name: str) -> MixturePoints:
    part, _, size = name.partition("_")
    files = REGMIX / f"{part}_mixture_{size}.csv", REGMIX / f"{part}_pile_loss_{size}.csv"
    return load_csv_mixtures(*files)


def compute_ranks(form: MixtureForm, size: str) -> dict[str, float]:
    """Return the rank correlation of each domain in percent, of models of a size."""
    fitted, tested = load_regmix("train_1m"), load_regmix(f"test_{size}")
    assert fitted.domains == tested.domains
    pairs = zip(fit_domains(form, fitted), tested.losses.T, tested.domains, strict=True)
    return {
        domain.removeprefix("metric/the_pile_").removesuffix("_val_loss"): 100
        * float(spearmanr(predict(tested.weights), losses).statistic)
        for predict, losses, domain in pairs
    }


@pytest.mark.slow
def test_lightgbm_has_the_published_rank_correlations() -> None:
    """The published regression stops early by the test set; this one has all 1,000 trees."""
    ranks = compute_ranks(MixtureForm.lightgbm, "1m")
    assert ranks == pytest.approx(PUBLISHED, abs=0.3)
    assert ranks["pile_cc"] >= 98.9
    assert min(ranks.values()) >= min(PUBLISHED.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "size", "pile_cc", "lowest"),
    [
        (MixtureForm.linear, "1m", 90.2, 73.8),
        (MixtureForm.linear, "60m", 89.3, 74.8),
        (MixtureForm.linear, "1B", 87.9, 56.1),
        (MixtureForm.log_linear, "1m", 96.6, 95.9),
        (MixtureForm.log_linear, "60m", 96.0, 94.8),
        (MixtureForm.log_linear, "1B", 98.8, 74.4),
        (MixtureForm.lightgbm, "60m", 98.6, 95.8),
        (MixtureForm.lightgbm, "1B", 96.2, 85.8),
    ],
)
def test_table_of_the_documentation(
    form: MixtureForm, size: str, pile_cc: float, lowest: float
) -> None:
    ranks = compute_ranks(form, size)
    assert ranks["pile_cc"] == pytest.approx(pile_cc, abs=0.15)
    assert min(ranks.values()) == pytest.approx(lowest, abs=0.15)


def test_log_linear_form_recovers_its_constants() -> None:
    points = build_points(num_mixtures=20)
    mixtures = np.random.default_rng(5).dirichlet(np.ones(3), 50)
    for domain, predict in enumerate(fit_domains(MixtureForm.log_linear, points)):
        expected = compute_losses(mixtures)[:, domain]
        np.testing.assert_allclose(predict(mixtures), expected, rtol=1e-6)
    assert CONSTANTS.shape == (2, 4)


def test_log_linear_form_is_the_best_of_random_starts() -> None:
    """Compare the sum of squares with that of SciPy's Levenberg-Marquardt from random starts."""
    from scipy.optimize import curve_fit

    points = build_points(num_mixtures=30, noise=0.02)
    losses = points.losses[:, 0]
    predict = fit_regression(MixtureForm.log_linear, points.weights, losses)
    cost = float(((predict(points.weights) - losses) ** 2).sum())
    generator, costs = np.random.default_rng(0), []

    def compute(weights: np.ndarray, c: float, *t: float) -> np.ndarray:
        return abs(c) + np.exp(weights @ np.array(t))

    for _ in range(20):
        start = [generator.uniform(0, 2), *generator.normal(0, 1, 3)]
        found, _ = curve_fit(compute, points.weights, losses, start, maxfev=20_000)
        costs.append(float(((compute(points.weights, *found) - losses) ** 2).sum()))
    assert cost <= min(costs) * (1 + 1e-6)


def test_linear_form_is_least_squares_with_an_intercept() -> None:
    points = build_points(num_mixtures=12, noise=0.1)
    losses = points.losses[:, 1]
    columns = np.column_stack([np.ones(12), points.weights[:, :-1]])
    expected = columns @ np.linalg.solve(columns.T @ columns, columns.T @ losses)
    predict = fit_regression(MixtureForm.linear, points.weights, losses)
    np.testing.assert_allclose(predict(points.weights), expected, rtol=1e-10)


def test_cross_validation_never_predicts_a_mixture_from_its_other_seeds() -> None:
    """With noise alone, runs of a mixture that share a large error must not predict each other."""
    points = build_points(num_mixtures=10, num_seeds=2)
    shared = np.repeat(np.random.default_rng(1).normal(3, 0.5, 10), 2)[:, None]
    points = replace(points, losses=np.hstack([shared, shared]))
    for form in (None, MixtureForm.linear):
        score = cross_validate(form, points, np.array([0.5, 0.5]))
        spread = float(shared.std())
        assert score.target_error > spread
        assert score.errors == pytest.approx([score.target_error] * 2)


def test_leave_one_out_of_the_mean_is_exact() -> None:
    """With ten mixtures, each part is one mixture, and the error has a closed form."""
    points = build_points(num_mixtures=10, noise=0.1)
    losses = points.losses[:, 0]
    score = cross_validate(None, points, np.array([1.0, 0.0]))
    deviations = (losses - losses.mean()) * 10 / 9
    assert score.target_error == pytest.approx(np.sqrt(np.mean(deviations**2)), rel=1e-12)


def test_missing_lightgbm_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from hlat.config.config_errors import ConfigError

    monkeypatch.setattr(mixture_regression, "find_spec", lambda name: None)
    assert MixtureForm.lightgbm not in mixture_regression.list_available_forms()
    points = build_points(num_mixtures=10)
    with pytest.raises(ConfigError, match=r"pip install 'hlat\[mixture\]'"):
        fit_regression(MixtureForm.lightgbm, points.weights, points.losses[:, 0])
