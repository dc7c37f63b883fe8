"""Specification and settings of schedule-free AdamW, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hlat.config.bounds import bounded
from hlat.config.components import register_component
from hlat.config.precision import Dtype
from hlat.model.parameter_spec import ParameterRole
from hlat.optim.optimizer_spec import OptimizerSpec, StateTensor

if TYPE_CHECKING:
    from hlat.config.optimizer import OptimizerConfig
    from hlat.config.run import Config

NAME = "schedule_free"
"""Value of optimizer.name."""
_SCHEDULE = "constant"
"""The only schedule: the average takes the place of a decay of the learning rate."""


@dataclass
class ScheduleFreeConfig:
    """Schedule-free AdamW, which averages its iterates and needs no decay of the learning rate."""

    warmup_steps: int = bounded(0, min=0)
    """Steps of the warm-up, the same as schedule.warmup_steps; the weights of the average are the
    squares of the learning rate in them. The preset refers to schedule.warmup_steps."""


class ScheduleFreeSpec(OptimizerSpec):
    """AdamW with averaged iterates (arXiv 2405.15682; AdamWScheduleFree of facebookresearch).

    The parameters hold y, at which gradients are computed. z is the iterate of AdamW, and x the
    average of z, which is evaluated.
    """

    title = "schedule-free AdamW"

    def list_state_tensors(self, role: ParameterRole) -> tuple[StateTensor, ...]:
        """Return the second moment, z and x.

        x is fp32 in every recipe: an update of an average over n steps is 1/n of the distance to z.
        """
        return (
            StateTensor("exp_avg_sq", "beta2", is_squared=True),
            StateTensor("z", None, is_weights=True),
            StateTensor("x", None, is_weights=True, is_average=True, dtype=Dtype.fp32),
        )

    def get_update_flops(self, role: ParameterRole) -> float:
        """Return 4 for the moment, 3 for the denominator, 5 for z, and 3 for each of x and y."""
        return 18

    def build_hyperparameters(
        self, settings: OptimizerConfig, role: ParameterRole
    ) -> dict[str, Any]:
        """Return the arguments of the update rule."""
        return {
            "betas": (settings.beta1, settings.beta2),
            "eps": settings.eps,
            "warmup_steps": settings.schedule_free.warmup_steps,
        }

    def get_gradient_source(self, settings: OptimizerConfig, role: ParameterRole) -> None:
        """Return None, since the state has the sizes of gradients, but not their signs."""
        return

    def find_conflicts(self, config: Config) -> Iterator[str]:
        """Require a constant rate after a warm-up that the optimizer has the length of."""
        own, schedule = config.optimizer.schedule_free.warmup_steps, config.schedule
        if schedule.name != _SCHEDULE:
            yield (
                f"schedule.name={schedule.name} decays the learning rate, and optimizer.name={NAME}"
                f" averages the weights instead; use schedule={_SCHEDULE}"
            )
        if own != schedule.warmup_steps:
            yield (
                f"optimizer.schedule_free.warmup_steps={own} differs from schedule.warmup_steps="
                f"{schedule.warmup_steps}; use optimizer={NAME}, or set it to the same value"
            )
        for index, stage in enumerate(config.phase.timeline):
            if stage.lr is not None:
                yield (
                    f"phase.timeline.{index}.lr={stage.lr} changes the learning rate, and the "
                    f"average of optimizer.name={NAME} is that of a constant one; set it to null"
                )


register_component(
    "optimizer",
    NAME,
    "AdamW with averaged iterates and without a decay of the learning rate.",
    ScheduleFreeSpec(),
    ScheduleFreeConfig,
)
