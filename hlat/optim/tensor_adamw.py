"""AdamW without Python numbers that change, so that one graph or kernel serves every step.

A Python number is a constant of a compiled graph, so that a learning rate that changes every step
would compile a graph every step. Whether a step is skipped, which torch's AdamW evaluates on the
host, is decided on the device.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class TensorAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101, algorithm 2) as computed by torch.

    An update is computed in one dtype and rounded once when it is stored. The state of a parameter
    is exp_avg, exp_avg_sq and step, the number of updates, an integer because bf16 counts to 256.

    Attributes:
        found_inf: Scalar on the device that is not zero to skip a step, as in torch's fused AdamW.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self._step_supports_amp_scaling = True
        self.found_inf: Tensor | None = None
        self._dtype = dtype
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
        self._lr.copy_(torch.tensor(lr, dtype=self._dtype), non_blocking=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters, or leave all bit-identical."""
        for group in self.param_groups:
            for param in group["params"]:
                self._update(param, group)

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        state, dtype = self.state[param], self._dtype
        assert param.grad is not None
        stored = [param, state["exp_avg"], state["exp_avg_sq"]]
        values = [tensor.to(dtype) for tensor in (param.grad, *stored)]
        step = state["step"] + 1
        updated = compute_adamw_update(values, step, self._lr, group)
        store_update([*stored, state["step"]], [*updated, step], self.found_inf)


def compute_adamw_update(
    values: list[Tensor], step: Tensor, lr: Tensor, group: dict[str, Any]
) -> list[Tensor]:
    """Return the new weights and moments.

    Args:
        values: Gradient, weights and both moments in one dtype.
        step: Number of updates, including this one.
        lr: Learning rate in the dtype of the values.
        group: Parameter group with betas, eps and weight_decay.
    """
    gradient, param, exp_avg, exp_avg_sq = values
    beta1, beta2 = group["betas"]
    exp_avg = torch.lerp(exp_avg, gradient, 1 - beta1)
    exp_avg_sq = exp_avg_sq * beta2 + gradient * gradient * (1 - beta2)
    corrections = [1 - torch.pow(beta, step.to(lr.dtype)) for beta in (beta1, beta2)]
    denominator = (exp_avg_sq / corrections[1]).sqrt() + group["eps"]
    decayed = param * (1 - lr * group["weight_decay"])
    return [decayed - lr / corrections[0] * exp_avg / denominator, exp_avg, exp_avg_sq]


def store_update(stored: list[Tensor], updated: list[Tensor], found_inf: Tensor | None) -> None:
    """Round updated tensors into the stored ones, or change nothing if `found_inf` is not zero."""
    for old, new in zip(stored, updated, strict=True):
        rounded = new.to(old.dtype)
        old.copy_(rounded if found_inf is None else torch.where(found_inf.bool(), old, rounded))
