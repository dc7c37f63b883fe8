"""Update rule of NorMuon (arXiv 2510.05491, algorithm 1)."""

import math
from typing import Any

from torch import Tensor

from hlat.config.components import set_implementation
from hlat.optim import muon, normuon_spec
from hlat.optim.adamw import ADAMW
from hlat.optim.muon_spec import UpdateScale
from hlat.optim.update_rule import UpdateRule

_EPS = 1e-10


def compute_matrix_update(
    values: list[Tensor], step: Tensor, group: dict[str, Any]
) -> list[Tensor]:
    """Return the update, the averaged gradient and the mean square of each row [rows, 1].

    The rows of Muon's update are divided by the root of their second moments. The result has the
    norm of an orthogonal matrix, so that the root mean square of the scaled update is 0.2
    (algorithm 1), or with the scale `original` the norm of Muon's update, as in the authors' code.
    """
    gradient, average, second_moment = values
    update, average = muon.compute_matrix_update([gradient, average], step, group)
    dtype, update = update.dtype, update.float()
    mean_square = update.square().mean(dim=1, keepdim=True)
    second_moment = second_moment.lerp(mean_square, 1 - group["beta2"])
    normalized = update / (second_moment.sqrt() + _EPS)
    norm = update.norm() if group["scale"] is UpdateScale.original else math.sqrt(min(update.shape))
    scaled = normalized * (norm / (normalized.norm() + _EPS))
    return [scaled.to(dtype), average, second_moment]


NORMUON = UpdateRule(ADAMW.compute, ADAMW.fused, compute_matrix_update)
set_implementation("optimizer", normuon_spec.NAME, NORMUON)
