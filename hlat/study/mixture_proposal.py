"""Proposal of a mixture: the lowest predicted loss within the sampled weights and the epochs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import OptimizeResult, minimize

from hlat.config.config_errors import ConfigError
from hlat.config.mixture_sampling import WEIGHT_STEP, compute_weight_limits, round_proportions
from hlat.study.mixture_points import MixturePoints, compute_shares
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
START_STEP = 0.01
"""Unit of the proposed start of a last phase."""


@dataclass(frozen=True)
class WeightBounds:
    """Range of the weights of a proposal, and of its start.

    Attributes:
        low: Smallest sampled weights [sources].
        sampled: Largest sampled weights [sources].
        limits: Largest shares over the run by the epochs [sources]; 1 without a limit.
        base: Weights before the start [sources].
        starts: Smallest and largest sampled start; 0 for mixtures of the whole run.
    """

    low: Array
    sampled: Array
    limits: Array
    base: Array
    starts: tuple[float, float]

    def limit_weights(self, starts: Array) -> Array:
        """Return the largest weights [starts, sources] of last phases with these starts."""
        before = starts[:, None]
        return np.asarray(
            np.minimum(self.sampled, (self.limits - before * self.base) / (1 - before))
        )

    def list_starts(self) -> Array:
        """Return the starts, in multiples of `START_STEP`, for which there are weights."""
        low, high = self.starts
        inside = np.arange(math.ceil(low / START_STEP), high / START_STEP) * START_STEP
        starts = np.unique(np.round([low, *inside, high], 10))
        largest = self.limit_weights(starts)
        return np.asarray(starts[(largest.sum(1) >= 1) & (largest >= self.low).all(1)])


@dataclass(frozen=True)
class MixtureProposal:
    """Mixture with the lowest predicted target.

    Attributes:
        form: Form of the regressions.
        weights: Proposed proportions [sources].
        start: Fraction of the tokens before them; 0 for a mixture of the whole run.
        bounds: Range in which they are searched.
        base_target: Predicted target of the base.
        gain: Predicted target of the base less that of the proposal, with the interval of the
            fitted constants.
        base_losses: Predicted losses of the base [domains].
        losses: The same of the proposal [domains].
    """

    form: MixtureForm
    weights: Array
    start: float
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

    @property
    def is_start_at_edge(self) -> bool:
        """True if the start is the smallest or the largest sampled one."""
        low, high = self.bounds.starts
        return not low + START_STEP / 2 < self.start < high - START_STEP / 2

    @property
    def shares(self) -> Array:
        """Proportions of the tokens of the whole run [sources]."""
        starts = np.array([self.start])
        return compute_shares(self.weights[None], starts, self.bounds.base).ravel()

    def find_limited(self) -> NDArray[np.intp]:
        """Return the sources whose weight is at the limit of the epochs."""
        bounds = self.bounds
        (largest,) = bounds.limit_weights(np.array([self.start]))
        is_near = self.weights >= largest - 2 * WEIGHT_STEP
        return np.flatnonzero(is_near & (largest < bounds.sampled))


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
    changed = points.starts < 1
    starts = points.starts[changed]
    bounds = WeightBounds(
        points.weights[changed].min(0),
        points.weights[changed].max(0),
        np.array([*limits.values()]),
        points.base,
        (float(starts.min()), float(starts.max())),
    )
    if not len(bounds.list_starts()):
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
        found, start = _search_candidates(points, predictors, target, bounds, seed)
    else:
        found, start = _minimize(points, predictors, target, bounds)
    weights = np.array(round_proportions(found.tolist()))
    pair = points.build_features(np.stack([points.base, weights]), np.array([start, start]))
    predicted = np.stack([predict(pair) for predict in predictors])
    targets = predict_target(predictors, target, pair)
    samples = _bootstrap_gain(form, points, target, pair, num_samples, seed)
    return MixtureProposal(
        form,
        weights,
        start,
        bounds,
        float(targets[0]),
        build_interval(targets[0] - targets[1], samples),
        *predicted.T,
    )


def _minimize(
    points: MixturePoints, predictors: Sequence[Predictor], target: Array, bounds: WeightBounds
) -> tuple[Array, float]:
    """Return the best weights and their start, with SciPy's SLSQP for each start.

    The linear and the log-linear form are convex in the proportions, so that every first point ends
    at the same loss.
    """
    results = []
    for start in bounds.list_starts().tolist():
        result = _minimize_from(start, points, predictors, target, bounds)
        results.append((float(result.fun), start, np.asarray(result.x)))
    _, start, weights = min(results, key=lambda result: result[:2])
    return weights, start


def _minimize_from(
    start: float,
    points: MixturePoints,
    predictors: Sequence[Predictor],
    target: Array,
    bounds: WeightBounds,
) -> OptimizeResult:
    """Return the minimum over the weights from a start to the end of the run."""
    starts = np.array([start])

    def predict(weights: Array) -> float:
        features = points.build_features(weights[None], starts)
        return float(predict_target(predictors, target, features)[0])

    (largest,) = bounds.limit_weights(starts)
    high = np.maximum(bounds.low, largest - WEIGHT_STEP * (largest < bounds.sampled))
    firsts = [np.clip(first, bounds.low, high) for first in (points.base, points.weights.mean(0))]
    results = [
        minimize(
            predict,
            first,
            method="SLSQP",
            bounds=np.stack([bounds.low, high], -1),
            constraints={"type": "eq", "fun": lambda weights: weights.sum() - 1},
            options={"ftol": 1e-12, "maxiter": 1000},
        )
        for first in firsts
    ]
    return min(results, key=lambda result: result.fun)


def _search_candidates(
    points: MixturePoints,
    predictors: Sequence[Predictor],
    target: Array,
    bounds: WeightBounds,
    seed: int,
) -> tuple[Array, float]:
    """Return the mean of the best of random averages of sampled mixtures, and of their starts.

    A single minimum of trees, which are constant in small regions, is arbitrary. Averages stay
    between the mixtures, so that none is an extrapolation.
    """
    generator = np.random.default_rng(seed)
    sampled = points.weights[points.starts < 1]
    chosen = generator.integers(len(sampled), size=(_NUM_CANDIDATES, _NUM_COMBINED))
    parts = generator.dirichlet(np.ones(_NUM_COMBINED), _NUM_CANDIDATES)
    candidates = np.einsum("ck,cks->cs", parts, sampled[chosen])
    starts = generator.choice(bounds.list_starts(), _NUM_CANDIDATES)
    within = (candidates <= bounds.limit_weights(starts)).all(1)
    if not within.any():
        raise ConfigError(
            "no average of sampled mixtures is within max_epochs; raise it, or use form=log_linear"
        )
    candidates, starts = candidates[within], starts[within]
    features = points.build_features(candidates, starts)
    order = np.argsort(predict_target(predictors, target, features), kind="stable")[:_NUM_BEST]
    start = round(float(starts[order].mean()) / START_STEP) * START_STEP
    return np.asarray(candidates[order].mean(0)), round(start, 10)


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
        pair: Features of base and proposal [2, features].
        num_samples: Number of samples.
        seed: Seed of the samples.
    """
    generator = np.random.default_rng(seed)
    mixtures = points.mixtures
    members = [np.flatnonzero(mixtures == index) for index in range(int(mixtures.max()) + 1)]
    used, features = np.flatnonzero(target), points.features
    gains = np.empty(num_samples)
    for sample in range(num_samples):
        drawn = generator.integers(len(members), size=len(members))
        rows = np.concatenate([members[index] for index in drawn])
        losses = points.losses[rows][:, used]
        predictors = [fit_regression(form, features[rows], column) for column in losses.T]
        base, proposal = predict_target(predictors, target[used], pair)
        gains[sample] = base - proposal
    return gains
