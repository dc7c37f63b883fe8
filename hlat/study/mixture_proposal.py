"""Proposal of a mixture: the lowest predicted loss within the sampled weights and the epochs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from hlat.config.config_errors import ConfigError
from hlat.config.mixture_sampling import WEIGHT_STEP, compute_weight_limits, round_proportions
from hlat.study.mixture_points import MixturePoints
from hlat.study.mixture_regression import (
    MixtureForm,
    Predictor,
    fit_regression,
    predict_target,
)
from hlat.study.power_law import Array
from hlat.study.scaling_fit import Interval, build_interval

_NUM_CANDIDATES = 100_000
_NUM_BEST = 128
"""Random mixtures for trees, and the best ones whose mean is proposed (RegMix)."""
_NUM_COMBINED = 3
"""Sampled mixtures of which a candidate is a random average."""
_EDGE = 0.01
"""Distance from the edge of the sampled weights, as a fraction of their range."""


@dataclass(frozen=True)
class WeightBounds:
    """Range of the weights of a proposal.

    Attributes:
        low: Smallest sampled weights [sources].
        sampled: Largest sampled weights [sources].
        limits: Largest weights by the epochs [sources]; 1 without a limit.
    """

    low: Array
    sampled: Array
    limits: Array

    @property
    def high(self) -> Array:
        """Largest weights [sources]."""
        return np.minimum(self.sampled, self.limits)


@dataclass(frozen=True)
class MixtureProposal:
    """Mixture with the lowest predicted target.

    Attributes:
        form: Form of the regressions.
        weights: Proposed proportions [sources].
        bounds: Range in which they are searched.
        base_target: Predicted target of the base.
        gain: Predicted target of the base less that of the proposal, with the interval of the
            fitted constants.
        base_losses: Predicted losses of the base [domains].
        losses: The same of the proposal [domains].
    """

    form: MixtureForm
    weights: Array
    bounds: WeightBounds
    base_target: float
    gain: Interval
    base_losses: Array
    losses: Array

    def find_edges(self) -> NDArray[np.intp]:
        """Return the sources whose weight is at the edge of the sampled ones.

        Weights of 0 and 1 are no such edges, nor is the limit of the epochs.
        """
        bounds = self.bounds
        margin = _EDGE * (bounds.sampled - bounds.low) + WEIGHT_STEP
        below = (self.weights <= bounds.low + margin) & (bounds.low > 0)
        above = (self.weights >= bounds.sampled - margin) & (bounds.sampled < 1)
        return np.flatnonzero(below | above)

    def find_limited(self) -> NDArray[np.intp]:
        """Return the sources whose weight is at the limit of the epochs."""
        bounds = self.bounds
        is_near = self.weights >= bounds.limits - 2 * WEIGHT_STEP
        return np.flatnonzero(is_near & (bounds.limits < bounds.sampled))


def build_bounds(points: MixturePoints, max_epochs: float, tokens: float) -> WeightBounds:
    """Return the range of the weights for a run of `tokens`, which may be unknown (NaN).

    Raises:
        ConfigError: No mixture is in the range.
    """
    known = zip(points.sources, points.tokens_per_epoch.tolist(), strict=True)
    sizes = {name: size for name, size in known if math.isfinite(size)}
    limits = compute_weight_limits(
        points.sources, {} if math.isnan(tokens) else sizes, max_epochs, tokens
    )
    bounds = WeightBounds(
        points.weights.min(0), points.weights.max(0), np.array([*limits.values()])
    )
    if bounds.high.sum() < 1 or (bounds.high < bounds.low).any():
        raise ConfigError(
            f"no sampled mixture reads every source at most max_epochs={max_epochs:g} times in "
            f"tokens={tokens:.4g}; raise max_epochs, or reduce tokens"
        )
    return bounds


def propose_mixture(
    form: MixtureForm,
    points: MixturePoints,
    predictors: Sequence[Predictor],
    target: Array,
    bounds: WeightBounds,
    num_samples: int,
    seed: int,
) -> MixtureProposal:
    """Return the mixture with the lowest predicted target.

    Args:
        form: Form of `predictors`.
        points: Points to which they are fitted.
        predictors: Regression of each domain.
        target: Weight of each domain in the mean [domains].
        bounds: Range of the weights.
        num_samples: Bootstrap samples of the gain.
        seed: Seed of the samples.
    """
    if form is MixtureForm.lightgbm:
        found = _search_candidates(points, predictors, target, bounds, seed)
    else:
        found = _minimize(points, predictors, target, bounds)
    weights = np.array(round_proportions(found.tolist()))
    pair = np.stack([points.base, weights])
    predicted = np.stack([predict(pair) for predict in predictors])
    targets = predict_target(predictors, target, pair)
    samples = _bootstrap_gain(form, points, target, pair, num_samples, seed)
    return MixtureProposal(
        form,
        weights,
        bounds,
        float(targets[0]),
        build_interval(targets[0] - targets[1], samples),
        *predicted.T,
    )


def _minimize(
    points: MixturePoints, predictors: Sequence[Predictor], target: Array, bounds: WeightBounds
) -> Array:
    """Return the minimum of a convex target, with SciPy's SLSQP.

    The linear and the log-linear form are convex in the proportions, so that every start ends at
    the same loss.
    """

    def predict(weights: Array) -> float:
        return float(predict_target(predictors, target, weights[None])[0])

    high = np.maximum(bounds.low, bounds.high - WEIGHT_STEP * (bounds.limits < bounds.sampled))
    starts = [np.clip(start, bounds.low, high) for start in (points.base, points.weights.mean(0))]
    results = [
        minimize(
            predict,
            start,
            method="SLSQP",
            bounds=np.stack([bounds.low, high], -1),
            constraints={"type": "eq", "fun": lambda weights: weights.sum() - 1},
            options={"ftol": 1e-12, "maxiter": 1000},
        )
        for start in starts
    ]
    return np.asarray(min(results, key=lambda result: result.fun).x)


def _search_candidates(
    points: MixturePoints,
    predictors: Sequence[Predictor],
    target: Array,
    bounds: WeightBounds,
    seed: int,
) -> Array:
    """Return the mean of the best of random averages of sampled mixtures.

    A single minimum of trees, which are constant in small regions, is arbitrary. Averages stay
    between the mixtures, so that none is an extrapolation.
    """
    generator = np.random.default_rng(seed)
    chosen = generator.integers(len(points), size=(_NUM_CANDIDATES, _NUM_COMBINED))
    shares = generator.dirichlet(np.ones(_NUM_COMBINED), _NUM_CANDIDATES)
    candidates = np.einsum("ck,cks->cs", shares, points.weights[chosen])
    within = candidates[(candidates <= bounds.high).all(1)]
    if not len(within):
        raise ConfigError(
            "no average of sampled mixtures is within max_epochs; raise it, or use form=log_linear"
        )
    order = np.argsort(predict_target(predictors, target, within), kind="stable")
    return np.asarray(within[order[:_NUM_BEST]].mean(0))


def _bootstrap_gain(
    form: MixtureForm,
    points: MixturePoints,
    target: Array,
    pair: Array,
    num_samples: int,
    seed: int,
) -> Array:
    """Return the predicted gain of each bootstrap sample of whole mixtures [samples].

    Args:
        form: Form of the regressions.
        points: Points to resample.
        target: Weight of each domain in the mean [domains].
        pair: Proportions of base and proposal [2, sources].
        num_samples: Number of samples.
        seed: Seed of the samples.
    """
    generator = np.random.default_rng(seed)
    mixtures = points.mixtures
    members = [np.flatnonzero(mixtures == index) for index in range(int(mixtures.max()) + 1)]
    used = np.flatnonzero(target)
    gains = np.empty(num_samples)
    for sample in range(num_samples):
        drawn = generator.integers(len(members), size=len(members))
        rows = np.concatenate([members[index] for index in drawn])
        weights, losses = points.weights[rows], points.losses[rows][:, used]
        predictors = [fit_regression(form, weights, column) for column in losses.T]
        base, proposal = predict_target(predictors, target[used], pair)
        gains[sample] = base - proposal
    return gains
