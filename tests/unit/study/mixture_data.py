"""Synthetic mixtures of three sources whose losses on two domains are log-linear."""

from pathlib import Path

import numpy as np

from hlat.study.mixture_points import MixturePoints
from hlat.study.power_law import Array

CONSTANTS = np.array([[1.1, -1.5, 0.4, 0.2], [0.7, 0.3, -0.8, 0.6]])
"""Irreducible loss, and coefficient of each source, of two domains."""
SOURCES = ("code", "data", "prose")
BASE = np.array([0.5, 0.2, 0.3])


def compute_losses(weights: Array) -> Array:
    """Return the losses [points, 2] at proportions [points, 3]."""
    return np.asarray(CONSTANTS[:, 0] + np.exp(weights @ CONSTANTS[:, 1:].T))


def build_points(
    num_mixtures: int, num_seeds: int = 1, noise: float = 0.0, tokens: float = 1e6
) -> MixturePoints:
    """Return random mixtures; an epoch of each source has 0.4 times `tokens`."""
    generator = np.random.default_rng(0)
    weights = np.repeat(generator.dirichlet(3 * BASE, num_mixtures), num_seeds, axis=0)
    losses = compute_losses(weights)
    return MixturePoints(
        location=str(Path("runs")),
        names=[f"run{index}" for index in range(len(weights))],
        sources=SOURCES,
        domains=("code", "data"),
        weights=weights,
        starts=np.zeros(len(weights)),
        losses=losses + generator.normal(0, noise, losses.shape),
        base=BASE,
        tokens=tokens,
        tokens_per_epoch=np.full(3, 0.4 * tokens),
    )
