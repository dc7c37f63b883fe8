"""Reference implementation of AdamW in fp64, without code of hlat.optim or torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlat.config.optimizer import OptimizerConfig

Array = NDArray[np.float64]


@dataclass(frozen=True)
class AdamWState:
    """Weight and moments of one parameter; `updates` is the number of updates so far."""

    weights: Array
    exp_avg: Array
    exp_avg_sq: Array
    updates: int


def build_states(
    tensors: Mapping[str, Mapping[str, NDArray[Any]]], updates: int
) -> dict[str, AdamWState]:
    """Return the state of each parameter, given weights and moments by key and name."""
    return {
        name: AdamWState(
            weight.astype(np.float64),
            tensors["exp_avg"][name].astype(np.float64),
            tensors["exp_avg_sq"][name].astype(np.float64),
            updates,
        )
        for name, weight in tensors["weights"].items()
    }


def update_adamw(
    settings: OptimizerConfig, state: AdamWState, gradient: Array | float, learning_rate: float
) -> AdamWState:
    """Return the state after one update (arXiv 1711.05101, algorithm 2, with a decay of lr w).

    Vectors are decayed only with optimizer.decay_norms.
    """
    count, beta1, beta2 = state.updates + 1, settings.beta1, settings.beta2
    exp_avg = beta1 * state.exp_avg + (1 - beta1) * gradient
    exp_avg_sq = beta2 * state.exp_avg_sq + (1 - beta2) * np.square(gradient)
    root = np.sqrt(exp_avg_sq / (1 - beta2**count))
    step = exp_avg / (1 - beta1**count) / (root + settings.eps)
    is_decayed = settings.decay_norms or state.weights.ndim > 1
    decay = settings.weight_decay * is_decayed * state.weights
    weights = state.weights - learning_rate * (step + decay)
    return AdamWState(weights, exp_avg, exp_avg_sq, count)
