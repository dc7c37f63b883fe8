"""Errors of measured gradients relative to exact ones."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

ExactGradients = dict[str, NDArray[np.float64]]


def sum_gradients(parts: list[ExactGradients]) -> ExactGradients:
    """Return the sums of the gradients of some micro batches; empty without any."""
    if not parts:
        return {}
    return {name: np.sum([part[name] for part in parts], axis=0) for name in parts[0]}


def compute_relative_errors(
    gradients: Mapping[str, NDArray[Any]], exact: Mapping[str, NDArray[Any]]
) -> dict[str, float]:
    """Return the relative error of each gradient.

    The gradients of some parameters are sums of terms that cancel. The error of the bias of a
    linear layer is relative to the gradient of its weight for a single input if that is larger: the
    softmax does not depend on the bias of keys that do not rotate, and its gradient is zero. The
    error of a single element is relative to the gradients of its module in the same way.
    """
    errors = {}
    for name, measured in gradients.items():
        error = compute_relative_error(measured, exact[name])
        module, _, parameter = name.rpartition(".")
        terms: list[NDArray[Any]] = []
        if parameter == "bias":
            terms = [exact.get(f"{module}.weight", exact[name])]
        elif measured.size == 1:
            terms = [values for other, values in exact.items() if other.startswith(f"{module}.")]
        if terms:
            norm = np.sqrt(sum(map(_compute_square_of_input, terms)))
            gap = float(np.linalg.norm(measured.astype(np.float64) - exact[name]) / norm)
            error = min(error, gap) if np.isfinite(gap) else error
        errors[name] = error
    return errors


def get_weight_name(name: str) -> str:
    """Return the name of the weight in the module of a bias; other names as they are."""
    return re.sub(r"\.bias$", ".weight", name)


def _compute_square_of_input(gradient: NDArray[Any]) -> float:
    """Return the squared norm of a gradient, divided by the number of inputs of a matrix."""
    return float(np.square(gradient).sum() / (gradient.shape[1] if gradient.ndim == 2 else 1))


def compute_relative_error(measured: NDArray[Any], exact: NDArray[Any]) -> float:
    """Return the norm of the difference over that of `exact`; infinity if it is not finite."""
    gap = np.linalg.norm((measured.astype(np.float64) - exact).ravel())
    norm = np.linalg.norm(exact.astype(np.float64).ravel())
    if gap == 0:
        return 0.0
    return float(gap / norm) if np.isfinite(gap) and norm > 0 else float("inf")
