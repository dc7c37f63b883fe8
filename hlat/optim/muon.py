"""Update rule of Muon (Keller Jordan, https://kellerjordan.github.io/posts/muon/)."""

from typing import Any

import torch
from torch import Tensor

from hlat.config.components import set_implementation
from hlat.optim import muon_spec
from hlat.optim.adamw import ADAMW
from hlat.optim.update_rule import UpdateRule
from hlat.precision.torch_dtypes import TORCH_DTYPES

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_MIN_NORM = 1e-7


def compute_matrix_update(
    values: list[Tensor], step: Tensor, group: dict[str, Any]
) -> list[Tensor]:
    """Return the orthogonalized momentum and the averaged gradient, as torch.optim.Muon."""
    gradient, average = values
    momentum = group["momentum"]
    average = torch.lerp(average, gradient, 1 - momentum)
    direction = torch.lerp(gradient, average, momentum) if group["nesterov"] else average
    dtype = TORCH_DTYPES[group["iteration_dtype"]]
    return [orthogonalize(direction, group["num_iterations"], dtype), average]


def orthogonalize(matrix: Tensor, num_iterations: int, dtype: torch.dtype) -> Tensor:
    """Return a matrix with singular values near 1 and the singular vectors of `matrix`.

    The coefficients of the Newton-Schulz iteration give singular values of 0.5 to 1.5.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix).to(dtype)
    x = x / x.norm().clamp(min=_MIN_NORM)
    for _ in range(num_iterations):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


MUON = UpdateRule(ADAMW.compute, ADAMW.fused, compute_matrix_update)
set_implementation("optimizer", muon_spec.NAME, MUON)
