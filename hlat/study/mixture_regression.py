"""Regressions of a held-out loss on the mixture of sources, with cross-validation.

The features of a mixture of the whole run are its proportions. Those of a last phase are shares
over the run and of recent tokens (phase_features.py).

The linear form and LightGBM are those of RegMix (Liu et al., arXiv 2407.01492, section 3.2), the
log-linear form that of data mixing laws (Ye et al., arXiv 2403.16952, equation 1), which Olmix uses
by default: L = c + exp(sum over sources of t_j r_j), with the proportions r_j and c at least 0.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.stats import spearmanr

from hlat.config.config_errors import ConfigError
from hlat.study.mixture_points import NUM_FOLDS, MixturePoints
from hlat.study.power_law import Array

LIGHTGBM_SETTINGS = {
    "objective": "regression",
    "learning_rate": 0.01,
    "seed": 42,
    "verbosity": -1,
    "num_threads": 1,
    "deterministic": True,
}
"""Settings of RegMix's regression (regression_fitting/regression.ipynb of sail-sg/regmix)."""
_NUM_TREES = 1000
_START_FRACTIONS = (0.0, 0.5, 0.9)
"""Irreducible losses of the starts, as fractions of the lowest loss."""
_MAX_EVALUATIONS = 100
"""Evaluations of a start. If the losses are almost linear, c is in a flat valley, in which further
ones change no prediction."""

Predictor = Callable[[Array], Array]
"""Function from features [points, features] to losses [points]."""


class MixtureForm(Enum):
    """Forms of a regression of the loss on the proportions of the sources."""

    linear = "linear"
    """Sum over sources of coefficient x proportion."""
    log_linear = "log_linear"
    """Irreducible loss plus the exponential of such a sum."""
    lightgbm = "lightgbm"
    """1,000 boosted trees (`pip install hlat[mixture]`)."""


@dataclass(frozen=True)
class FormScore:
    """Cross-validated predictions of a form.

    Attributes:
        form: Form; None for the mean of the other mixtures.
        predictions: Losses that are predicted without the mixture of the point [points, domains].
        error: Root mean square error of the domains, weighted as in the target.
        target_error: Root mean square error of the target.
        target_rank: Spearman's rank correlation of the target.
        errors: Root mean square error of each domain [domains].
        ranks: Spearman's rank correlation of each domain [domains].
    """

    form: MixtureForm | None
    predictions: Array
    error: float
    target_error: float
    target_rank: float
    errors: Array
    ranks: Array


def list_available_forms() -> list[MixtureForm]:
    """Return the forms whose library is installed."""
    has_lightgbm = find_spec("lightgbm") is not None
    return [form for form in MixtureForm if form is not MixtureForm.lightgbm or has_lightgbm]


def fit_regression(form: MixtureForm, weights: Array, losses: Array) -> Predictor:
    """Return the regression of a loss [points] on features [points, features].

    Raises:
        ConfigError: LightGBM is not installed.
    """
    if form is MixtureForm.linear:
        return _fit_linear(weights, losses)
    if form is MixtureForm.log_linear:
        return _fit_log_linear(weights, losses)
    return _fit_lightgbm(weights, losses)


def fit_domains(form: MixtureForm, points: MixturePoints) -> list[Predictor]:
    """Return the regression of each domain."""
    return [fit_regression(form, points.features, losses) for losses in points.losses.T]


def predict_target(predictors: Sequence[Predictor], target: Array, features: Array) -> Array:
    """Return the weighted mean of the losses [points] at features [points, features].

    Args:
        predictors: Regression of each domain.
        target: Weight of each domain in the mean [domains]; their sum is 1.
        features: Features.
    """
    used = [(predict, share) for predict, share in zip(predictors, target, strict=True) if share]
    return np.asarray(sum(share * predict(features) for predict, share in used))


def cross_validate(form: MixtureForm | None, points: MixturePoints, target: Array) -> FormScore:
    """Return the predictions of each point by a form that is fitted without its mixture.

    The mixtures are divided at random into up to `NUM_FOLDS` parts, equal for all forms. All runs
    of a mixture are in one part.
    """
    folds = _assign_folds(points.mixtures)
    features, predictions = points.features, np.empty_like(points.losses)
    for fold in range(int(folds.max()) + 1):
        inside = folds == fold
        for domain, losses in enumerate(points.losses.T):
            if form is None:
                predictions[inside, domain] = losses[~inside].mean()
            else:
                predict = fit_regression(form, features[~inside], losses[~inside])
                predictions[inside, domain] = predict(features[inside])
    pairs = [*zip(predictions.T, points.losses.T, strict=True)]
    whole = predictions @ target, points.losses @ target
    errors = np.array([compute_error(*pair) for pair in pairs])
    return FormScore(
        form,
        predictions,
        float(np.sqrt(target @ errors**2)),
        compute_error(*whole),
        compute_rank_correlation(*whole),
        errors,
        np.array([compute_rank_correlation(*pair) for pair in pairs]),
    )


def compute_error(predicted: Array, observed: Array) -> float:
    """Return the root mean square error."""
    return float(np.sqrt(np.mean((predicted - observed) ** 2)))


def compute_rank_correlation(predicted: Array, observed: Array) -> float:
    """Return Spearman's rank correlation; NaN if one side is constant."""
    if np.ptp(predicted) == 0 or np.ptp(observed) == 0:
        return math.nan
    return float(spearmanr(predicted, observed).statistic)


def _assign_folds(mixtures: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the part of each point [points]."""
    num_mixtures = int(mixtures.max()) + 1
    order = np.random.default_rng(0).permutation(num_mixtures)
    return order[mixtures] % min(NUM_FOLDS, num_mixtures)


def _fit_linear(weights: Array, losses: Array) -> Predictor:
    coefficients = np.linalg.lstsq(weights, losses, rcond=None)[0]
    return lambda mixtures: np.asarray(mixtures @ coefficients)


def _fit_log_linear(weights: Array, losses: Array) -> Predictor:
    """Return the log-linear form with the smallest sum of squares from all starts.

    A start has a fixed irreducible loss and the coefficients of a linear regression of the
    logarithm.
    """
    lowest = float(losses.min())
    bounds = np.full(1 + weights.shape[1], -np.inf)
    bounds[0] = 0

    def compute_residuals(constants: Array) -> Array:
        return np.asarray(constants[0] + _exponentiate(weights, constants) - losses)

    def compute_derivatives(constants: Array) -> Array:
        terms = _exponentiate(weights, constants)[:, None] * weights
        return np.hstack([np.ones((len(weights), 1)), terms])

    fits = []
    for fraction in _START_FRACTIONS:
        start = fraction * lowest
        coefficients = np.linalg.lstsq(weights, np.log(losses - start), rcond=None)[0]
        fits.append(
            least_squares(
                compute_residuals,
                np.concatenate([[start], coefficients]),
                compute_derivatives,
                bounds=(bounds, np.inf),
                x_scale="jac",
                max_nfev=_MAX_EVALUATIONS,
            )
        )
    constants = min(fits, key=lambda fit: fit.cost).x
    return lambda mixtures: np.asarray(constants[0] + _exponentiate(mixtures, constants))


def _exponentiate(weights: Array, constants: Array) -> Array:
    """Return the exponential of the sum over sources [points], limited to finite values."""
    return np.exp(np.minimum(weights @ constants[1:], 100.0))


def _fit_lightgbm(weights: Array, losses: Array) -> Predictor:
    if MixtureForm.lightgbm not in list_available_forms():
        raise ConfigError("form=lightgbm needs the package lightgbm; pip install 'hlat[mixture]'")
    import lightgbm

    data = lightgbm.Dataset(weights, losses)
    booster = lightgbm.train(LIGHTGBM_SETTINGS, data, num_boost_round=_NUM_TREES)
    return lambda mixtures: np.asarray(booster.predict(mixtures), np.float64)
