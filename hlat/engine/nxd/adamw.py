"""AdamW all of whose numbers are tensors on the device, so that one graph serves every step.

A Python number in an update becomes a constant of XLA's graph: a learning rate that changes with
each step would have each step compiled. And what torch's own AdamW asks of the host, whether a step
is to be skipped, is decided on the device here, element by element.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101, algorithm 2) as torch computes it.

    All of it in one dtype, and what is written is cast, and so rounded, once. State of a parameter:
    exp_avg, exp_avg_sq, and step, the count of its updates, an integer: bf16 counts to 256.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        dtype: torch.dtype,
        prepare: Callable[[list[dict[str, Any]]], Tensor],
    ) -> None:
        """Make zero moments.

        Args:
            params: Parameters, or groups of them.
            lr: Rate until another is set with `set_rate`.
            betas: Decay of both moments.
            eps: Added to the denominator.
            weight_decay: Share of the rate by which weights shrink in each update.
            dtype: In which updates are computed.
            prepare: Called with the groups when all gradients are there: clips them, and returns
                whether the update is to be made at all, bool [].
        """
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, settings)
        self._prepare, self._dtype = prepare, dtype
        device = self.param_groups[0]["params"][0].device
        self._rate = torch.tensor(lr, dtype=dtype, device=device)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter] = {
                "step": torch.zeros((), dtype=torch.int32, device=device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def set_rate(self, rate: float) -> None:
        """Let the next updates have a learning rate."""
        self._rate.copy_(torch.tensor(rate, dtype=self._dtype))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters by their gradients, or none of them by a bit."""
        finite = self._prepare(self.param_groups)
        for group in self.param_groups:
            for parameter in group["params"]:
                self._update(parameter, group, finite)

    def _update(self, parameter: Tensor, group: dict[str, Any], finite: Tensor) -> None:
        state, dtype = self.state[parameter], self._dtype
        assert parameter.grad is not None
        gradient = parameter.grad.to(dtype)
        beta1, beta2 = group["betas"]
        step = state["step"] + 1
        first = torch.lerp(state["exp_avg"].to(dtype), gradient, 1 - beta1)
        second = state["exp_avg_sq"].to(dtype) * beta2 + gradient * gradient * (1 - beta2)
        corrections = [1 - torch.pow(beta, step.to(dtype)) for beta in (beta1, beta2)]
        denominator = (second / corrections[1]).sqrt() + group["eps"]
        decayed = parameter.to(dtype) * (1 - self._rate * group["weight_decay"])
        updated = decayed - self._rate / corrections[0] * first / denominator
        for old, new in (
            (parameter, updated),
            (state["exp_avg"], first),
            (state["exp_avg_sq"], second),
            (state["step"], step),
        ):
            old.copy_(torch.where(finite, new.to(old.dtype), old))
