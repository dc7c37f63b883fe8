"""AdamW without Python numbers that change, so that one XLA graph serves every step.

A Python number is a constant of the graph, so that a learning rate that changes every step
would compile a graph every step. Whether a step is skipped, which torch's AdamW evaluates on the
host, is decided on the device.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class XlaAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101, algorithm 2) as computed by torch.

    An update is computed in one dtype and rounded once when it is stored. The state of a parameter
    is exp_avg, exp_avg_sq and step, the number of updates, an integer because bf16 counts to 256.
    `clip_and_check` is called with the groups when all gradients are available; it clips them and
    returns True to update, a bool scalar on the device.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        dtype: torch.dtype,
        clip_and_check: Callable[[list[dict[str, Any]]], Tensor],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self._clip_and_check, self._dtype = clip_and_check, dtype
        device = self.param_groups[0]["params"][0].device
        self._lr = torch.tensor(lr, dtype=dtype, device=device)
        for param in (p for group in self.param_groups for p in group["params"]):
            self.state[param] = {
                "step": torch.zeros((), dtype=torch.int32, device=device),
                "exp_avg": torch.zeros_like(param),
                "exp_avg_sq": torch.zeros_like(param),
            }

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next updates."""
        self._lr.copy_(torch.tensor(lr, dtype=self._dtype))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters, or leave all bit-identical."""
        finite = self._clip_and_check(self.param_groups)
        for group in self.param_groups:
            for param in group["params"]:
                self._update(param, group, finite)

    def _update(self, param: Tensor, group: dict[str, Any], finite: Tensor) -> None:
        state, dtype = self.state[param], self._dtype
        assert param.grad is not None
        gradient = param.grad.to(dtype)
        beta1, beta2 = group["betas"]
        step = state["step"] + 1
        exp_avg = torch.lerp(state["exp_avg"].to(dtype), gradient, 1 - beta1)
        exp_avg_sq = state["exp_avg_sq"].to(dtype) * beta2 + gradient * gradient * (1 - beta2)
        corrections = [1 - torch.pow(beta, step.to(dtype)) for beta in (beta1, beta2)]
        denominator = (exp_avg_sq / corrections[1]).sqrt() + group["eps"]
        decayed = param.to(dtype) * (1 - self._lr * group["weight_decay"])
        updated = decayed - self._lr / corrections[0] * exp_avg / denominator
        for old, new in (
            (param, updated),
            (state["exp_avg"], exp_avg),
            (state["exp_avg_sq"], exp_avg_sq),
            (state["step"], step),
        ):
            old.copy_(torch.where(finite, new.to(old.dtype), old))
