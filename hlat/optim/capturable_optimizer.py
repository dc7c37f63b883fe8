"""Optimizer without Python numbers that change, so that one graph or kernel serves every step.

A Python number is a constant of a compiled graph, so that a learning rate that changes every step
would compile a graph every step. Whether a step is skipped, which torch's optimizers evaluate on
the host, is decided on the device.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hlat.optim.eager_optimizer import EagerOptimizer
from hlat.optim.update_rule import ParamGroups, UpdateRule, init_state, store_update
from hlat.precision.stochastic_rounding import iter_row_chunks


class CapturableOptimizer(EagerOptimizer):
    """Optimizer that applies an update rule to whole tensors.

    An update is computed in one dtype and rounded once when it is stored. `step`, the number of
    updates of a parameter, is an integer because bf16 counts to 256.

    Attributes:
        found_inf: Scalar on the device that is not zero to skip a step, as in torch's fused AdamW.
    """

    def __init__(
        self,
        param_groups: ParamGroups,
        rule: UpdateRule,
        lr: float,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(param_groups, {"lr": lr})
        self._step_supports_amp_scaling = True
        self.found_inf: Tensor | None = None
        self._rule, self._dtype = rule, dtype
        device = self.param_groups[0]["params"][0].device
        self._lr = torch.tensor(lr, dtype=dtype, device=device)
        init_state(self, torch.int32)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next updates."""
        self._lr.copy_(torch.tensor(lr, dtype=self._dtype), non_blocking=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters, or leave all bit-identical."""
        for group in self.param_groups:
            factor = group["lr_factor"]
            lr = self._lr if factor == 1 else self._lr * factor
            for param in group["params"]:
                self._update(param, lr, group)

    def _update(self, param: Tensor, lr: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        assert param.grad is not None
        tensors = [param.grad, param, *(state[name] for name in group["state_names"])]
        step = state["step"] + 1
        for gradient, *stored in self._split(tensors):
            values = [tensor.to(self._dtype) for tensor in (gradient, *stored)]
            store_update(stored, self._rule.compute(values, step, lr, group), self.found_inf)
        store_update([state["step"]], [step], self.found_inf)

    def _split(self, tensors: list[Tensor]) -> Iterable[Sequence[Tensor]]:
        """Return chunks of rows that fit the cache of a CPU; whole tensors on other devices."""
        if tensors[0].device.type != "cpu":
            return [tensors]
        return (chunk for _, chunk in iter_row_chunks(tensors))
