"""AdamW where gradients, weights and moments need not have one dtype, and bf16 may round by lot.

An update is mostly smaller than half the distance between two values of bf16, so rounding to
nearest loses it; rounding stochastically keeps it on average (HLAT paper, section III-D). The
arithmetic of a step is torch's own, in fp32, on a few rows at a time, so that copies in fp32 cost
next to no memory.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hlat.engine.native.noise import Draw
from hlat.engine.native.rounding import Rounding, Stack


class ChunkedAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW for tensors in fp32 or bf16, whose gradients may be in the other."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        draw: Callable[[Tensor], Draw] | None,
        compiled: bool = False,
        **settings: Any,
    ) -> None:
        """Make no state yet.

        Args:
            groups: Parameter groups; moments take the dtype of the parameters.
            draw: The numbers that round a bf16 parameter and its moments in the next update, given
                the parameter; None: to nearest.
            compiled: Whether TorchInductor rounds.
            **settings: lr, betas, eps and weight_decay, as of torch.optim.AdamW.
        """
        super().__init__(list(groups), settings)
        self._step_supports_amp_scaling = True
        self.found_inf: Tensor | None = None
        """1.0 for a step that must change nothing, as torch's own AdamW knows it; else 0.0."""
        self._draw = draw
        self._rounding = Rounding(compiled)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)

    def _update(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(weight)
        narrow = weight.dtype != torch.float32
        draw = self._draw(weight) if narrow and self._draw is not None else None
        state["step"] += 1
        if self.found_inf is not None:
            state["step"] -= self.found_inf
        tensors = (gradient, weight, state["exp_avg"], state["exp_avg_sq"])
        for rows, (given, *stored) in self._rounding.chunks(*tensors):
            values = self._fp32("gradient", [given]) + self._fp32("kept", stored)
            _adamw(values, state["step"], group, self.found_inf)
            if draw is not None:
                self._rounding.round_(self._stack("kept", stored), draw, rows)
            if narrow:
                torch._foreach_copy_(stored, values[1:])

    def _fp32(self, slot: str, tensors: list[Tensor]) -> list[Tensor]:
        """Tensors of one dtype: themselves if it is fp32, else copies."""
        if tensors[0].dtype == torch.float32:
            return tensors
        copies = self._stack(slot, tensors).each
        torch._foreach_copy_(copies, tensors)
        return copies

    def _stack(self, slot: str, tensors: list[Tensor]) -> Stack:
        return self._rounding.take(slot, len(tensors), tensors[0].shape, tensors[0].device)


def _adamw(
    values: list[Tensor], step: Tensor, group: dict[str, Any], found_inf: Tensor | None
) -> None:
    """Update, of gradient, weights and both moments in fp32, all but the first.

    This is torch's kernel itself: torch.optim's function around it takes as long as a small chunk.
    """
    gradient, weight, exp_avg, exp_avg_sq = values
    beta1, beta2 = group["betas"]
    torch._fused_adamw_(
        [weight],
        [gradient],
        [exp_avg],
        [exp_avg_sq],
        [],
        [step],
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
        found_inf=found_inf,
    )
