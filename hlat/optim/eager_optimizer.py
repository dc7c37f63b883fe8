"""torch.optim.Optimizer without the parts of torch.compile, and the optimizer of a fused kernel."""

from typing import Any

import torch
from torch import Tensor

from hlat.optim.update_rule import FusedKernel, ParamGroups, init_state


class EagerOptimizer(torch.optim.Optimizer):
    """torch.optim.Optimizer whose methods do not import torch.compile.

    torch excludes its own methods from compilation when they are called first. The import that this
    needs takes as long as torch's.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Append a group, with defaults for its missing settings."""
        param_group["params"] = [*param_group["params"]]
        self.param_groups.append(param_group)
        for name, default in self.defaults.items():
            param_group.setdefault(name, default)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients of all parameters."""
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None


class FusedOptimizer(EagerOptimizer):
    """Optimizer that calls a fused kernel with all tensors of a group.

    Attributes:
        found_inf: Scalar on the device that is 1 to skip a step and else 0; None: no step.
    """

    def __init__(self, param_groups: ParamGroups, kernel: FusedKernel, lr: float) -> None:
        super().__init__(param_groups, {"lr": lr})
        self._step_supports_amp_scaling = True
        self.found_inf: Tensor | None = None
        self._kernel = kernel
        init_state(self)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters, or leave all bit-identical."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            states = [self.state[param] for param in params]
            steps = [state["step"] for state in states]
            stored = [[state[name] for state in states] for name in group["state_names"]]
            torch._foreach_add_(steps, 1)
            values = [[param.grad for param in params], params, *stored]
            self._kernel.update_(values, steps, group["lr"], group, self.found_inf)
            if self.found_inf is not None:
                torch._foreach_sub_(steps, [self.found_inf] * len(steps))
