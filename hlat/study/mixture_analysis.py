"""Regressions of a mixture study with their cross-validated error, and its proposal."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hlat.config.config_errors import ConfigError
from hlat.study.mixture_points import MixturePoints, validate_mixtures
from hlat.study.mixture_proposal import MixtureProposal, build_bounds, propose_mixture
from hlat.study.mixture_regression import (
    FormScore,
    MixtureForm,
    cross_validate,
    fit_domains,
    list_available_forms,
)
from hlat.study.phase_features import choose_exponent
from hlat.study.power_law import Array


@dataclass(frozen=True)
class MixtureSettings:
    """Settings of an analysis.

    Attributes:
        target: Weight of each domain in the mean; empty: equal weights.
        form: Form of the proposal; None: that with the lowest cross-validated error of the
            domains, which vary more than their mean.
        max_epochs: Largest number of passes over a source.
        tokens: Training tokens of the run for which the epochs are limited; None: of the runs.
        num_samples: Bootstrap samples of the gain.
        seed: Seed of the samples.
    """

    target: Mapping[str, float]
    form: MixtureForm | None
    max_epochs: float
    tokens: float | None
    num_samples: int
    seed: int


@dataclass(frozen=True)
class MixtureAnalysis:
    """Regressions of a study.

    Attributes:
        points: Fitted points.
        settings: Settings.
        target: Weight of each domain in the mean [domains].
        tokens: Tokens of the run for which the epochs are limited; NaN if unknown.
        mean_score: Cross-validation of the mean of the other mixtures.
        scores: Cross-validation of each form.
        proposal: Proposed mixture.
        notes: Points and forms that are omitted.
    """

    points: MixturePoints
    settings: MixtureSettings
    target: Array
    tokens: float
    mean_score: FormScore
    scores: Sequence[FormScore]
    proposal: MixtureProposal
    notes: Sequence[str]

    @property
    def warnings(self) -> list[str]:
        """Limits of the proposal."""
        proposal, sources = self.proposal, self.points.sources
        lines = []
        chosen = next(score for score in self.scores if score.form is proposal.form)
        if not chosen.target_error < self.mean_score.target_error:
            lines.append(
                f"the error of {proposal.form.value}, {chosen.target_error:.3g}, is not below that "
                f"of the mean of all mixtures, {self.mean_score.target_error:.3g}: the form does "
                "not explain the target; train more mixtures, seeds or steps"
            )
        if len(edges := proposal.find_edges()):
            names = ", ".join(sources[index] for index in edges)
            lines.append(
                f"the proposal is at the edge of the sampled weights of {names}; a better mixture "
                "may be outside: sample wider, with a smaller study.mixture.min_strength"
            )
        if self.points.has_phase.any():
            lines += self._list_start_warnings()
        if proposal.gain.value <= 0:
            lines.append("no mixture is predicted to be better than the base")
        elif not proposal.gain.low > 0:
            lines.append("the interval of the gain contains 0")
        return lines

    def _list_start_warnings(self) -> list[str]:
        """Return the limits of the start of a last phase."""
        proposal, points = self.proposal, self.points
        low, high = proposal.bounds.starts
        if low == high:
            return [f"the start is {low:.2f} in all runs, so that its effect is unknown"]
        lines = []
        if math.isnan(points.exponent):
            lines.append(
                "recent shares do not reduce the error, so that only the tokens of each source "
                "count: other starts with other weights have the same prediction"
            )
        elif proposal.is_start_at_edge:
            lines.append(
                f"the start is at the edge of the sampled ones, {low:.2f} to {high:.2f}; a better "
                "start may be outside: set study.mixture.min_start or max_start"
            )
        return lines


def analyze_mixtures(
    points: MixturePoints, settings: MixtureSettings, notes: Sequence[str] = ()
) -> MixtureAnalysis:
    """Return the regressions of all forms and the proposal.

    Raises:
        ConfigError: The points do not determine a regression, a setting names no domain, or no
            mixture is within the limits.
    """
    validate_mixtures(points)
    target = _build_target(points.domains, settings.target)
    points = choose_exponent(points, target)
    tokens = points.tokens if settings.tokens is None else settings.tokens
    bounds = build_bounds(points, settings.max_epochs, tokens)
    forms = list_available_forms()
    if settings.form is not None and settings.form not in forms:
        raise ConfigError(f"form={settings.form.value} needs lightgbm; pip install 'hlat[mixture]'")
    notes = [*notes]
    if MixtureForm.lightgbm not in forms:
        notes.append("lightgbm is omitted, as it is not installed; pip install 'hlat[mixture]'")
    scores = [cross_validate(form, points, target) for form in forms]
    best = min(scores, key=lambda score: score.error).form
    form = settings.form or best
    assert form is not None, "only the score of the mean has no form"
    predictors = fit_domains(form, points)
    proposal = propose_mixture(
        form, points, predictors, target, bounds, settings.num_samples, settings.seed
    )
    mean_score = cross_validate(None, points, target)
    return MixtureAnalysis(points, settings, target, tokens, mean_score, scores, proposal, notes)


def _build_target(domains: Sequence[str], target: Mapping[str, float]) -> Array:
    """Return the weight of each domain, with sum 1."""
    for name in target:
        if name not in domains:
            raise ConfigError(
                f"target: {name} is no held-out set of the points; use {', '.join(domains)}"
            )
    weights = np.array([target.get(name, 0.0 if target else 1.0) for name in domains])
    total = math.fsum(weights)
    if not 0 < total < math.inf:
        raise ConfigError("target has no weight above 0; give one such as target=code:1")
    return np.asarray(weights / total)
