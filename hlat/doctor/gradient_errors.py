"""Errors of measured gradients relative to exact ones."""

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

    The error of a bias is relative to the gradient of its weight for a single input if that is
    larger: the softmax does not depend on the bias of keys that do not rotate, and its gradient is
    zero.
    """
    errors = {}
    for name, measured in gradients.items():
        error = compute_relative_error(measured, exact[name])
        if name.endswith(".bias"):
            weight = exact[f"{name.removesuffix('bias')}weight"]
            norm = np.linalg.norm(weight) / np.sqrt(weight.shape[1])
            gap = float(np.linalg.norm(measured.astype(np.float64) - exact[name]) / norm)
            error = min(error, gap) if np.isfinite(gap) else error
        errors[name] = error
    return errors


def compute_relative_error(measured: NDArray[Any], exact: NDArray[Any]) -> float:
    """Return the norm of the difference over that of `exact`; infinity if it is not finite."""
    gap = np.linalg.norm((measured.astype(np.float64) - exact).ravel())
    norm = np.linalg.norm(exact.astype(np.float64).ravel())
    if gap == 0:
        return 0.0
    return float(gap / norm) if np.isfinite(gap) and norm > 0 else float("inf")
