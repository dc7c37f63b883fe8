"""Specification of Lion, without torch; its settings are fields of OptimizerConfig."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hlat.config.components import register_component
from hlat.model.parameter_spec import ParameterRole
from hlat.optim.optimizer_spec import OptimizerSpec, StateTensor

if TYPE_CHECKING:
    from hlat.config.optimizer import OptimizerConfig

NAME = "lion"
"""Value of optimizer.name."""


class LionSpec(OptimizerSpec):
    """Sign of an interpolation of momentum and gradient (arXiv 2302.06675, algorithm 2)."""

    title = "Lion"

    def list_state_tensors(self, role: ParameterRole) -> tuple[StateTensor, ...]:
        """Return the momentum."""
        return (StateTensor("exp_avg", "beta2"),)

    def get_update_flops(self, role: ParameterRole) -> float:
        """Return 4 for the direction, 3 for the momentum, 1 for decay and 2 for the step."""
        return 10

    def build_hyperparameters(
        self, settings: OptimizerConfig, role: ParameterRole
    ) -> dict[str, Any]:
        """Return the decays of direction and momentum."""
        return {"betas": (settings.beta1, settings.beta2)}

    def get_gradient_source(
        self, settings: OptimizerConfig, role: ParameterRole
    ) -> tuple[str, float]:
        """Return the momentum, 1 - beta2 times the gradient."""
        return "exp_avg", 1 - settings.beta2


register_component("optimizer", NAME, "Sign of the momentum.", LionSpec())
