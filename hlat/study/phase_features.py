"""Features of a mixture that changes once: shares over the run, and shares of recent tokens.

Two mixtures with equal tokens of each source can have different losses, since the last ones count
more or less than the first ones (Blakeney et al., arXiv 2406.03476: upsampling of domains is best
in the last 10% to 20% of the tokens). The features are therefore two weighted means of the weights
over the tokens: with equal weights, and with those of t^exponent at the fraction t of the run. Both
are the base weights if the last phase is empty, and its own weights if it is the whole run.
"""

from dataclasses import replace

import numpy as np

from hlat.study.mixture_points import MixturePoints
from hlat.study.mixture_regression import MixtureForm, cross_validate
from hlat.study.power_law import Array

EXPONENTS = (2.0, 4.0, 8.0, 16.0)
"""Exponents of recent shares: half of their weight is on the last 29%, 16%, 8% and 4% of the
tokens."""


def choose_exponent(points: MixturePoints, target: Array) -> MixturePoints:
    """Return the points with the exponent whose cross-validated error is the lowest.

    The error is that of a linear form of the log of the loss, which is the log-linear form without
    an irreducible loss, and has no iterations. The shares over the run are the only features if all
    starts are equal, so that they determine the recent shares, or if no exponent reduces the error.

    Args:
        points: Points to which the form is fitted.
        target: Weight of each domain in the error [domains].
    """
    if len(np.unique(points.starts[points.has_phase])) < 2:
        return points
    candidates = [points, *(replace(points, exponent=value) for value in EXPONENTS)]
    logs = np.log(points.losses)
    scores = [
        cross_validate(MixtureForm.linear, replace(each, losses=logs), target)
        for each in candidates
    ]
    return candidates[int(np.argmin([score.error for score in scores]))]
