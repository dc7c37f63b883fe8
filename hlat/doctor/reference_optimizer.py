"""Reference implementations of optimizers in fp64, without code of hlat.optim or torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
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


_SIDES = ("left", "right")
"""Preconditioners of rows and columns of SOAP."""
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
    if "momentum_buffer" not in state.tensors:
        return _update_others(settings, settings.muon, state, gradient, learning_rate)
    average, update = _orthogonalize_average(settings.muon, state, gradient)
    step = _compute_muon_scale(settings.muon, update) * update
    weights = state.weights - learning_rate * (step + settings.weight_decay * state.weights)
    return ReferenceState({"weights": weights, "momentum_buffer": average}, state.updates + 1)


def update_normuon(
    settings: OptimizerConfig, state: ReferenceState, gradient: Array | float, learning_rate: float
) -> ReferenceState:
    """Return the state after one update of NorMuon (arXiv 2510.05491, algorithm 1), or of AdamW."""
    normuon = settings.normuon
    if "momentum_buffer" not in state.tensors:
        return _update_others(settings, normuon, state, gradient, learning_rate)
    average, update = _orthogonalize_average(normuon, state, gradient)
    second = state.tensors["second_momentum_buffer"]
    second = normuon.beta2 * second + (1 - normuon.beta2) * np.mean(update**2, 1, keepdims=True)
    step = update / (np.sqrt(second) + 1e-10)
    size = np.linalg.norm(step) + 1e-10
    if normuon.scale.value == "original":
        step *= np.linalg.norm(update) / size * _compute_muon_scale(normuon, update)
    else:
        step *= 0.2 * np.sqrt(step.size) / size
    weights = state.weights - learning_rate * (step + settings.weight_decay * state.weights)
    tensors = {"weights": weights, "momentum_buffer": average, "second_momentum_buffer": second}
    return ReferenceState(tensors, state.updates + 1)


def _update_others(
    settings: OptimizerConfig,
    muon: Any,
    state: ReferenceState,
    gradient: Array | float,
    learning_rate: float,
) -> ReferenceState:
    """Return the state after one update of AdamW with the learning rate in the settings of Muon."""
    ratio = 1.0 if muon.adamw_lr is None else muon.adamw_lr / settings.lr
    return update_adamw(settings, state, gradient, learning_rate * ratio)


def _orthogonalize_average(
    muon: Any, state: ReferenceState, gradient: Array | float
) -> tuple[Array, Array]:
    """Return the new average of gradients, and the orthogonalized direction."""
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
    return average, x


def _compute_muon_scale(muon: Any, update: Array) -> float:
    num_rows, num_columns = update.shape
    return {
        "original": float(np.sqrt(max(1, num_rows / num_columns))),
        "match_rms_adamw": 0.2 * float(np.sqrt(max(num_rows, num_columns))),
    }[muon.scale.value]


def update_soap(
    settings: OptimizerConfig, state: ReferenceState, gradient: Array | float, learning_rate: float
) -> ReferenceState:
    """Return the state after one update of SOAP (arXiv 2409.11321, algorithm 3), or of AdamW."""
    if "rotated_exp_avg_sq" not in state.tensors:
        return update_adamw(settings, state, gradient, learning_rate)
    new, count, beta1, beta2 = {**state.tensors}, state.updates, settings.beta1, settings.beta2
    matrix = np.broadcast_to(gradient, state.weights.shape)
    bases = [new.get(f"{_SIDES[axis]}_basis", np.eye(matrix.shape[axis])) for axis in (0, 1)]
    step = square = np.zeros(matrix.shape)
    new["exp_avg"] = (beta1 * new["exp_avg"] + (1 - beta1) * matrix) * (count > 0)
    if count > 0:
        rotated = bases[0].T @ matrix @ bases[1]
        square = beta2 * new["rotated_exp_avg_sq"] + (1 - beta2) * rotated**2
        rotated = bases[0].T @ new["exp_avg"] @ bases[1] / (np.sqrt(square) + settings.eps)
        step = bases[0] @ rotated @ bases[1].T
        step *= np.sqrt(1 - beta2**count) / (1 - beta1**count)
    new["weights"] = state.weights - learning_rate * (step + settings.weight_decay * state.weights)
    new["rotated_exp_avg_sq"] = _update_soap_bases(settings, new, matrix, square, count)
    return ReferenceState(new, count + 1)


def _update_soap_bases(
    settings: OptimizerConfig, new: dict[str, Array], gradient: Array, square: Array, count: int
) -> Array:
    """Update preconditioners and eigenbases in place; return the reordered second moment."""
    soap = settings.soap
    for axis, side in enumerate(_SIDES):
        if f"{side}_gram" not in new:
            continue
        product = gradient @ gradient.T if axis == 0 else gradient.T @ gradient
        beta = soap.preconditioner_beta
        gram = new[f"{side}_gram"] = beta * new[f"{side}_gram"] + (1 - beta) * product
        basis = new[f"{side}_basis"]
        if count == 0:
            new[f"{side}_basis"] = np.linalg.eigh(gram)[1][:, ::-1]
        elif count % soap.precondition_frequency == 0:
            order = np.argsort(-np.diag(basis.T @ gram @ basis), kind="stable")
            orthogonal, triangle = np.linalg.qr(gram @ basis[:, order])
            new[f"{side}_basis"] = orthogonal * np.where(np.diag(triangle) < 0, -1.0, 1.0)
            square = np.take(square, order, axis)
    return square


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


def update_schedule_free(
    settings: OptimizerConfig, state: ReferenceState, gradient: Array | float, learning_rate: float
) -> ReferenceState:
    """Return the state after one update of schedule-free AdamW (arXiv 2405.15682, algorithm 1).

    The weights are y. An update has the weight of its squared learning rate in the average x.
    """
    tensors, count = state.tensors, state.updates + 1
    beta1, beta2 = settings.beta1, settings.beta2
    exp_avg_sq = beta2 * tensors["exp_avg_sq"] + (1 - beta2) * np.square(gradient)
    root = np.sqrt(exp_avg_sq / (1 - beta2**count))
    is_decayed = settings.decay_norms or state.weights.ndim > 1
    decay = settings.weight_decay * is_decayed * state.weights
    z = tensors["z"] - learning_rate * (gradient / (root + settings.eps) + decay)
    warmup = settings.schedule_free.warmup_steps
    rates = np.minimum(np.arange(1, count + 1), warmup) / warmup if warmup else np.ones(count)
    share = rates[-1] ** 2 / np.square(rates).sum()
    x = (1 - share) * tensors["x"] + share * z
    weights = (1 - beta1) * z + beta1 * x
    return ReferenceState({"weights": weights, "exp_avg_sq": exp_avg_sq, "z": z, "x": x}, count)


def update_ademamix(
    settings: OptimizerConfig, state: ReferenceState, gradient: Array | float, learning_rate: float
) -> ReferenceState:
    """Return the state after one update of AdEMAMix (arXiv 2409.03137, algorithm 1)."""
    own, beta1, beta2 = settings.ademamix, settings.beta1, settings.beta2
    tensors, count = state.tensors, state.updates + 1
    progress = min(1.0, count / own.warmup_steps) if own.warmup_steps else 1.0
    beta3 = own.beta3
    if progress < 1:
        logs = np.log(beta1), np.log(own.beta3)
        beta3 = np.exp(logs[0] * logs[1] / ((1 - progress) * logs[1] + progress * logs[0]))
    exp_avg = beta1 * tensors["exp_avg"] + (1 - beta1) * gradient
    exp_avg_sq = beta2 * tensors["exp_avg_sq"] + (1 - beta2) * np.square(gradient)
    slow = beta3 * tensors["exp_avg_slow"] + (1 - beta3) * gradient
    root = np.sqrt(exp_avg_sq / (1 - beta2**count))
    step = (exp_avg / (1 - beta1**count) + progress * own.alpha * slow) / (root + settings.eps)
    is_decayed = settings.decay_norms or state.weights.ndim > 1
    decay = settings.weight_decay * is_decayed * state.weights
    moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "exp_avg_slow": slow}
    weights = state.weights - learning_rate * (step + decay)
    return ReferenceState({"weights": weights, **moments}, count)


_UPDATES: dict[str, ReferenceUpdate] = {
    "adamw": update_adamw,
    "ademamix": update_ademamix,
    "lion": update_lion,
    "muon": update_muon,
    "normuon": update_normuon,
    "schedule_free": update_schedule_free,
    "soap": update_soap,
}
"""Updates by optimizer.name."""


def find_reference_update(settings: OptimizerConfig) -> ReferenceUpdate | None:
    """Return the reference of the configured optimizer, or None if there is none."""
    update = _UPDATES.get(settings.name)
    if update is None or settings.ema_decay is None:
        return update
    return partial(_update_with_ema, update, settings.ema_decay)


def _update_with_ema(
    update: ReferenceUpdate,
    decay: float,
    settings: OptimizerConfig,
    state: ReferenceState,
    gradient: Array | float,
    learning_rate: float,
) -> ReferenceState:
    """Return the state after an update, with the moving average of the weights if it has one."""
    after = update(settings, state, gradient, learning_rate)
    if "ema" not in state.tensors:
        return after
    average = decay * state.tensors["ema"] + (1 - decay) * after.weights
    return ReferenceState(after.tensors | {"ema": average}, after.updates)


def format_missing_reference(settings: OptimizerConfig) -> str:
    """Return the reason why the update of an optimizer is not checked."""
    return f"the doctor has no reference implementation of optimizer.name={settings.name}"


def get_width_exponent(settings: OptimizerConfig, state: ReferenceState) -> float:
    """Return the power of the width to which the learning rate of a hidden matrix is proportional.

    It is -1 for updates by element, and the negative power of the update's spectral norm for
    orthogonalized ones (arXiv 2310.17813).
    """
    if "momentum_buffer" not in state.tensors:
        return -1.0
    scale: str = getattr(settings, settings.name).scale.value
    return {"original": 0.0, "match_rms_adamw": -0.5}[scale]


def remove_second_rate(settings: OptimizerConfig) -> OptimizerConfig:
    """Return settings in which all parameters have the rate that is given for the update."""
    section: Any = getattr(settings, settings.name, None)
    if not hasattr(section, "adamw_lr"):
        return settings
    changed: dict[str, Any] = {settings.name: replace(section, adamw_lr=None)}
    return replace(settings, **changed)
