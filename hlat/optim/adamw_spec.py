"""Specification of AdamW, without torch; its settings are fields of OptimizerConfig."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hlat.config.components import register_component
from hlat.model.parameter_spec import ParameterRole
from hlat.optim.optimizer_spec import OptimizerSpec, StateTensor

if TYPE_CHECKING:
    from hlat.config.optimizer import OptimizerConfig


NAME = "adamw"
"""Value of optimizer.name."""


class AdamWSpec(OptimizerSpec):
    """Adam with decoupled weight decay (arXiv 1711.05101, algorithm 2)."""

    title = "AdamW"
    nxdt_names: tuple[str, ...] = ("adamw", "adamw_fp32OptState")

    def list_state_tensors(self, role: ParameterRole) -> tuple[StateTensor, ...]:
        """Return the moments, named as in torch.optim.AdamW."""
        return StateTensor("exp_avg", "beta1"), StateTensor("exp_avg_sq", "beta2", is_squared=True)

    def get_update_flops(self, role: ParameterRole) -> float:
        """Return 3 and 4 for the moments, 3 for the denominator, 1 for decay and 3 for the step."""
        return 14

    def build_hyperparameters(
        self, settings: OptimizerConfig, role: ParameterRole
    ) -> dict[str, Any]:
        """Return the arguments of torch.optim.AdamW."""
        return {"betas": (settings.beta1, settings.beta2), "eps": settings.eps}

    def get_gradient_source(
        self, settings: OptimizerConfig, role: ParameterRole
    ) -> tuple[str, float]:
        """Return the first moment, 1 - beta1 times the gradient."""
        return "exp_avg", 1 - settings.beta1


register_component("optimizer", NAME, "Adam with decoupled weight decay.", AdamWSpec())
