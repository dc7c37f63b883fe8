"""Regressions on mixtures and their proposal as tables for a terminal, and as JSON."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hlat.study.mixture_analysis import MixtureAnalysis
from hlat.study.mixture_regression import FormScore
from hlat.study.scaling_fit import CONFIDENCE
from hlat.study.scaling_text import format_interval, summarize_interval
from hlat.tracking.text_format import UNKNOWN, format_table

Table = tuple[list[str], list[list[str]]]
"""Headers and rows."""
_MAX_DOMAINS = 6
"""Largest number of domains with a column in a terminal."""


def format_mixtures(analysis: MixtureAnalysis) -> list[str]:
    """Return the tables for a terminal."""
    lines = [format_headline(analysis), *analysis.notes]
    for caption, (headers, rows) in build_tables(analysis).items():
        lines += ["", caption, *format_table(headers, rows)]
    lines += ["", *format_start(analysis), format_gain(analysis)]
    return [*lines, *(f"WARNING: {warning}" for warning in analysis.warnings)]


def format_headline(analysis: MixtureAnalysis) -> str:
    """Return the number of mixtures and points, and their sources."""
    points = analysis.points
    count = int(points.mixtures.max()) + 1
    return (
        f"{count:,} mixtures of {len(points.sources)} sources in {len(points):,} models of "
        f"{points.location}"
    )


def format_start(analysis: MixtureAnalysis) -> list[str]:
    """Return the start of a proposed last phase as a sentence; empty for the whole run."""
    points, proposal = analysis.points, analysis.proposal
    if not points.has_phase.any():
        return []
    low, high = proposal.bounds.starts
    features = "shares over the run"
    if not math.isnan(points.exponent):
        half = 1 - 0.5 ** (1 / points.exponent)
        features += f" and recent shares, of which the last {half:.0%} of the tokens are half"
    return [
        f"the proposal is for a last phase after {proposal.start:.2f} of the tokens, sampled "
        f"{low:.2f} to {high:.2f}; features: {features}"
    ]


def format_gain(analysis: MixtureAnalysis) -> str:
    """Return the predicted gain of the proposal as a sentence."""
    proposal = analysis.proposal
    return (
        f"predicted {format_target(analysis)} of the base {proposal.base_target:.4g}, gain of the "
        f"proposal {format_interval(proposal.gain, 3)}, {CONFIDENCE:.0%} interval"
    )


def format_target(analysis: MixtureAnalysis) -> str:
    """Return the target as a phrase."""
    if not analysis.settings.target:
        return "mean over the held-out sets"
    return f"mean of {', '.join(f'{name}:{w:g}' for name, w in analysis.settings.target.items())}"


def build_tables(analysis: MixtureAnalysis) -> dict[str, Table]:
    """Return the tables of errors, of weights and of losses by their captions."""
    form = analysis.proposal.form.value
    return {
        "cross-validated error, and rank correlation of the mean": _build_errors(analysis),
        f"proposal of {form}": _build_weights(analysis),
        f"losses predicted by {form}": _build_losses(analysis),
    }


def summarize_mixtures(analysis: MixtureAnalysis) -> dict[str, Any]:
    """Return all numbers as JSON-able values; an unknown one is None."""
    points, proposal = analysis.points, analysis.proposal
    bounds = proposal.bounds
    return {
        "points": len(points),
        "mixtures": int(points.mixtures.max()) + 1,
        "location": points.location,
        "target": dict(zip(points.domains, analysis.target.tolist(), strict=True)),
        "errors": [_summarize_score(score, points.domains) for score in _list_scores(analysis)],
        "proposal": {
            "form": proposal.form.value,
            "weights": dict(zip(points.sources, proposal.weights.tolist(), strict=True)),
            "start": proposal.start,
            "starts": list(bounds.starts),
            "exponent": None if math.isnan(points.exponent) else points.exponent,
            "shares": dict(zip(points.sources, proposal.shares.tolist(), strict=True)),
            "base": dict(zip(points.sources, points.base.tolist(), strict=True)),
            "limits": dict(zip(points.sources, bounds.limits.tolist(), strict=True)),
            "base_target": proposal.base_target,
            "gain": summarize_interval(proposal.gain),
            "base_losses": dict(zip(points.domains, proposal.base_losses.tolist(), strict=True)),
            "losses": dict(zip(points.domains, proposal.losses.tolist(), strict=True)),
        },
        "confidence": CONFIDENCE,
        "notes": [*analysis.notes],
        "warnings": analysis.warnings,
    }


def _list_scores(analysis: MixtureAnalysis) -> list[FormScore]:
    return [analysis.mean_score, *analysis.scores]


def _get_name(score: FormScore) -> str:
    return "mean of the mixtures" if score.form is None else score.form.value


def _summarize_score(score: FormScore, domains: Sequence[str]) -> dict[str, Any]:
    ranks = [None if math.isnan(rank) else rank for rank in score.ranks.tolist()]
    return {
        "form": None if score.form is None else score.form.value,
        "error": score.error,
        "target_error": score.target_error,
        "target_rank": None if math.isnan(score.target_rank) else score.target_rank,
        "errors": dict(zip(domains, score.errors.tolist(), strict=True)),
        "ranks": dict(zip(domains, ranks, strict=True)),
    }


def _build_errors(analysis: MixtureAnalysis) -> Table:
    domains = analysis.points.domains
    shown = domains if len(domains) <= _MAX_DOMAINS else []
    rows = [
        [
            _get_name(score),
            f"{score.error:.3g}",
            f"{score.target_error:.3g}",
            # Predictions of the mean differ by the omitted mixture only
            UNKNOWN if score.form is None else _format_percent(score.target_rank),
            *(f"{error:.3g}" for error in score.errors[: len(shown)]),
        ]
        for score in _list_scores(analysis)
    ]
    return ["form", "all sets", "their mean", "rank", *shown], rows


def _build_weights(analysis: MixtureAnalysis) -> Table:
    points, proposal = analysis.points, analysis.proposal
    bounds, edges = proposal.bounds, proposal.find_edges().tolist()
    limited = proposal.find_limited().tolist()
    epochs = proposal.shares * analysis.tokens / points.tokens_per_epoch
    rows = []
    for index, source in enumerate(points.sources):
        remarks = ["edge of the sampled weights"] * (index in edges)
        remarks += [f"limit of {analysis.settings.max_epochs:g} epochs"] * (index in limited)
        rows.append(
            [
                source,
                f"{points.base[index]:.3f}",
                f"{proposal.weights[index]:.3f}",
                f"{bounds.low[index]:.3f} to {bounds.sampled[index]:.3f}",
                *([f"{proposal.shares[index]:.3f}"] if points.has_phase.any() else []),
                f"{epochs[index]:.2g}" if np.isfinite(epochs[index]) else UNKNOWN,
                ", ".join(remarks),
            ]
        )
    run = ["whole run"] if points.has_phase.any() else []
    return ["source", "base", "proposal", "sampled", *run, "epochs", ""], rows


def _build_losses(analysis: MixtureAnalysis) -> Table:
    proposal = analysis.proposal
    pairs = zip(analysis.points.domains, proposal.base_losses, proposal.losses, strict=True)
    rows = [
        [domain, f"{base:.4f}", f"{loss:.4f}", f"{loss - base:+.4f}"]
        for domain, base, loss in pairs
    ]
    return ["held-out set", "base", "proposal", "difference"], rows


def _format_percent(value: float) -> str:
    return UNKNOWN if math.isnan(value) else f"{100 * value:.1f} %"
