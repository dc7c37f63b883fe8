"""Learning rate, weight decay and eps of each role of parameters, without torch.

hlat.model.parametrization_spec has the settings of a parametrization, and its rules for the model
and the initial values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hlat.model.parameter_spec import ParameterRole
from hlat.model.parametrization_spec import (
    ParametrizationName,
    compute_depth_ratio,
    compute_width_ratio,
)
from hlat.optim.optimizer_spec import get_optimizer_spec

if TYPE_CHECKING:
    from hlat.config.model import ModelConfig
    from hlat.config.optimizer import OptimizerConfig

_HIDDEN_MATRICES = (ParameterRole.matrix, ParameterRole.residual, ParameterRole.router)
_OUTSIDE_OF_LAYERS = (ParameterRole.embedding, ParameterRole.head)


@dataclass(frozen=True)
class UpdateSettings:
    """Settings of the updates of the parameters with a role.

    Attributes:
        lr_factor: Learning rate relative to that of the schedule, which has the peak optimizer.lr.
        weight_decay: Decoupled weight decay, a factor of the learning rate.
        eps_factor: Factor of eps, in optimizers that have it.
    """

    lr_factor: float
    weight_decay: float
    eps_factor: float


def compute_update_settings(
    settings: OptimizerConfig, role: ParameterRole, model: ModelConfig | None = None
) -> UpdateSettings:
    """Return the settings for a role: those of the optimizer, scaled by the parametrization.

    Gradients become smaller with width, and within layers with depth; eps follows them (arXiv
    2505.01618, table 1 and equation 40). The final norm has the eps of the norms of layers.
    CompleteP keeps the product of rate and decay of hidden matrices, muP their decay. None instead
    of a model is the standard parametrization.
    """
    spec = get_optimizer_spec(settings.name)
    lr: float | None = getattr(settings.lr_by_role, role.value)
    lr_factor = spec.get_lr_factor(settings, role) if lr is None else lr / settings.lr
    weight_decay = spec.get_weight_decay(settings, role)
    if model is None or model.parametrization.name is ParametrizationName.standard:
        return UpdateSettings(lr_factor, weight_decay, 1.0)
    width, depth = compute_width_ratio(model), compute_depth_ratio(model)
    eps_factor = 1 / (width if role in _OUTSIDE_OF_LAYERS else width * depth)
    if role not in _HIDDEN_MATRICES:
        return UpdateSettings(lr_factor, weight_decay, eps_factor)
    factor = width ** spec.get_lr_width_exponent(settings, role)
    if model.parametrization.name is ParametrizationName.completep:
        weight_decay /= factor
    return UpdateSettings(lr_factor * factor, weight_decay, eps_factor)
