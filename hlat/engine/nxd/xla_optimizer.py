"""Optimizer for NxD's optimizers, which provide the gradients while a step runs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hlat.optim.capturable_optimizer import CapturableOptimizer
from hlat.optim.update_rule import ParamGroups, UpdateRule


class XlaOptimizer(CapturableOptimizer):
    """Optimizer that clips gradients and decides on the device whether a step is skipped.

    `clip_and_check` is called with the groups when all gradients are available; it clips them and
    returns True to update, a bool scalar on the device. Learning rate and number of updates have
    one dimension, because XLA makes a scalar that is copied from the host as 0 or 1 a constant of
    the graph, and equal scalars one parameter.
    """

    def __init__(
        self,
        param_groups: ParamGroups,
        rule: UpdateRule,
        lr: float,
        dtype: torch.dtype,
        clip_and_check: Callable[[list[dict[str, Any]]], Tensor],
    ) -> None:
        super().__init__(param_groups, rule, lr, dtype)
        self._clip_and_check = clip_and_check
        self._lr = self._lr.new_full((1,), lr)
        for state in self.state.values():
            state["step"] = state["step"].new_zeros(1)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next updates."""
        self._lr.copy_(torch.tensor([lr], dtype=self._dtype))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters, or leave all bit-identical."""
        self.found_inf = ~self._clip_and_check(self.param_groups)
        super().step()
