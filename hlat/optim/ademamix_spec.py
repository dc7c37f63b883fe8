"""Specification and settings of AdEMAMix, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hlat.config.bounds import bounded
from hlat.config.components import register_component
from hlat.config.precision import Dtype
from hlat.model.parameter_spec import ParameterRole
from hlat.optim.adamw_spec import AdamWSpec
from hlat.optim.optimizer_spec import StateTensor

if TYPE_CHECKING:
    from hlat.config.optimizer import OptimizerConfig
    from hlat.config.run import Config

NAME = "ademamix"
"""Value of optimizer.name."""


@dataclass
class AdEMAMixConfig:
    """AdEMAMix: AdamW with a second, slow average of the gradients."""

    alpha: float = bounded(8.0, min=0)
    """Factor of the slow average in the update."""
    beta3: float = bounded(0.9999, above=0, below=1)
    """Decay of the slow average."""
    warmup_steps: int | None = bounded(None, min=1)
    """Updates over which alpha increases linearly from 0, and the half-life of the slow average
    from that of beta1; null: no warm-up. The preset refers to schedule.total_steps."""


class AdEMAMixSpec(AdamWSpec):
    """AdamW with a mixture of a fast and a slow average (arXiv 2409.03137, algorithm 1)."""

    title = "AdEMAMix"
    nxdt_names = ()

    def list_state_tensors(self, role: ParameterRole) -> tuple[StateTensor, ...]:
        """Return the moments and the slow average.

        The slow average is fp32 in every recipe: an update is 1 - beta3 times the gradient.
        """
        slow = StateTensor("exp_avg_slow", None, dtype=Dtype.fp32)
        return (*super().list_state_tensors(role), slow)

    def get_update_flops(self, role: ParameterRole) -> float:
        """Return those of AdamW, 3 for the slow average, and 3 for the mixture."""
        return super().get_update_flops(role) + 6

    def build_hyperparameters(
        self, settings: OptimizerConfig, role: ParameterRole
    ) -> dict[str, Any]:
        """Return the arguments of the update rule."""
        own = settings.ademamix
        return super().build_hyperparameters(settings, role) | {
            "alpha": own.alpha,
            "beta3": own.beta3,
            "warmup_steps": own.warmup_steps,
        }

    def find_conflicts(self, config: Config) -> Iterator[str]:
        """Require a positive beta1, from which the decay of the slow average increases."""
        own, beta1 = config.optimizer.ademamix, config.optimizer.beta1
        if own.warmup_steps is not None and not 0 < beta1 <= own.beta3:
            yield (
                f"optimizer.ademamix.warmup_steps={own.warmup_steps} increases the decay of the "
                f"slow average from optimizer.beta1={beta1} to optimizer.ademamix.beta3="
                f"{own.beta3}; use a beta1 above 0 and up to beta3, or "
                "optimizer.ademamix.warmup_steps=null"
            )


register_component(
    "optimizer",
    NAME,
    "AdamW with a second, slow average of the gradients.",
    AdEMAMixSpec(),
    AdEMAMixConfig,
)
