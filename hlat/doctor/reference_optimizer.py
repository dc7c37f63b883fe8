"""Reference implementations of optimizers in fp64, without code of hlat.optim or torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlat.config.optimizer import OptimizerConfig

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ReferenceState:
    """Weight and optimizer state of one parameter.

    Attributes:
        tensors: `weights`, and the tensors of the optimizer by name.
        updates: Number of updates so far.
    """

    tensors: dict[str, Array]
    updates: int

    @property
    def weights(self) -> Array:
        """Weight of the parameter."""
        return self.tensors["weights"]


ReferenceUpdate = Callable[[OptimizerConfig, ReferenceState, Array | float, float], ReferenceState]
"""Returns the state after an update with a gradient and a learning rate."""


def build_states(
    tensors: Mapping[str, Mapping[str, NDArray[Any]]], updates: int
) -> dict[str, ReferenceState]:
    """Return the state of each parameter, given weights and optimizer state by key and name."""
    return {
        name: ReferenceState(
            {
                key: by_name[name].astype(np.float64)
                for key, by_name in tensors.items()
                if name in by_name
            },
            updates,
        )
        for name in tensors["weights"]
    }


def update_adamw(
    settings: OptimizerConfig, state: ReferenceState, gradient: Array | float, learning_rate: float
) -> ReferenceState:
    """Return the state after one update (arXiv 1711.05101, algorithm 2, with a decay of lr w).

    Vectors are decayed only with optimizer.decay_norms.
    """
    count, beta1, beta2 = state.updates + 1, settings.beta1, settings.beta2
    exp_avg = beta1 * state.tensors["exp_avg"] + (1 - beta1) * gradient
    exp_avg_sq = beta2 * state.tensors["exp_avg_sq"] + (1 - beta2) * np.square(gradient)
    root = np.sqrt(exp_avg_sq / (1 - beta2**count))
    step = exp_avg / (1 - beta1**count) / (root + settings.eps)
    is_decayed = settings.decay_norms or state.weights.ndim > 1
    decay = settings.weight_decay * is_decayed * state.weights
    weights = state.weights - learning_rate * (step + decay)
    tensors = {"weights": weights, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    return ReferenceState(tensors, count)


def update_muon(
    settings: OptimizerConfig, state: ReferenceState, gradient: Array | float, learning_rate: float
) -> ReferenceState:
    """Return the state after one update of Muon (arXiv 2502.16982), or of AdamW.

    Only matrices of decoder layers have an average that is orthogonalized.
    """
    muon = settings.muon
    if "momentum_buffer" not in state.tensors:
        ratio = 1.0 if muon.adamw_lr is None else muon.adamw_lr / settings.lr
        return update_adamw(settings, state, gradient, learning_rate * ratio)
    average = muon.momentum * state.tensors["momentum_buffer"] + (1 - muon.momentum) * gradient
    direction = average
    if muon.nesterov:
        direction = muon.momentum * average + (1 - muon.momentum) * gradient
    num_rows, num_columns = direction.shape
    x = direction / max(float(np.linalg.norm(direction)), 1e-7)
    for _ in range(muon.num_iterations):
        square = x @ x.T if num_rows <= num_columns else x.T @ x
        polynomial = -4.775 * square + 2.0315 * square @ square
        x = 3.4445 * x + (polynomial @ x if num_rows <= num_columns else x @ polynomial)
    scale = {
        "original": np.sqrt(max(1, num_rows / num_columns)),
        "match_rms_adamw": 0.2 * np.sqrt(max(num_rows, num_columns)),
    }[muon.scale.value]
    weights = state.weights - learning_rate * (scale * x + settings.weight_decay * state.weights)
    return ReferenceState({"weights": weights, "momentum_buffer": average}, state.updates + 1)


def update_lion(
    settings: OptimizerConfig, state: ReferenceState, gradient: Array | float, learning_rate: float
) -> ReferenceState:
    """Return the state after one update of Lion (arXiv 2302.06675, algorithm 2)."""
    momentum, beta1, beta2 = state.tensors["exp_avg"], settings.beta1, settings.beta2
    direction = np.sign(beta1 * momentum + (1 - beta1) * gradient)
    is_decayed = settings.decay_norms or state.weights.ndim > 1
    decay = settings.weight_decay * is_decayed * state.weights
    weights = state.weights - learning_rate * (direction + decay)
    tensors = {"weights": weights, "exp_avg": beta2 * momentum + (1 - beta2) * gradient}
    return ReferenceState(tensors, state.updates + 1)


_UPDATES: dict[str, ReferenceUpdate] = {
    "adamw": update_adamw,
    "lion": update_lion,
    "muon": update_muon,
}
"""Updates by optimizer.name."""


def find_reference_update(settings: OptimizerConfig) -> ReferenceUpdate | None:
    """Return the reference of the configured optimizer, or None if there is none."""
    return _UPDATES.get(settings.name)


def format_missing_reference(settings: OptimizerConfig) -> str:
    """Return the reason why the update of an optimizer is not checked."""
    return f"the doctor has no reference implementation of optimizer.name={settings.name}"
