"""AdamW with separate dtypes for gradients and weights, and stochastic rounding to bf16.

Most updates are smaller than half the distance between two values of bf16, so that rounding to
nearest loses them; stochastic rounding preserves them on average (HLAT paper, section III-D). The
arithmetic is torch's fused kernel, or that of TensorAdamW on a device without it, in fp32 on a few
rows at a time, so that fp32 copies cost almost no memory.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hlat.optim.adamw import fused_adamw_, has_fused_adamw
from hlat.optim.tensor_adamw import compute_adamw_update, store_update
from hlat.precision.random_bits import RandomBits
from hlat.precision.stochastic_rounding import ScratchBuffer, StochasticRounder


class ChunkedAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW for fp32 or bf16 tensors, with gradients in either dtype.

    Args:
        param_groups: Parameter groups; moments have the dtype of the parameters.
        get_random_bits: Returns the random bits that round a bf16 parameter and its moments in the
            next update, given the parameter; None: round to nearest.
        compile_backend: Backend of torch.compile for the rounding; None: eager operators.
        **defaults: lr, betas, eps and weight_decay of torch.optim.AdamW.
    """

    def __init__(
        self,
        param_groups: Iterable[dict[str, Any]],
        get_random_bits: Callable[[Tensor], RandomBits] | None,
        compile_backend: str | None = None,
        **defaults: Any,
    ) -> None:
        super().__init__(list(param_groups), defaults)
        self._step_supports_amp_scaling = True
        self.found_inf: Tensor | None = None
        """1.0 to skip a step, 0.0 otherwise, as in torch's fused AdamW."""
        self._get_random_bits = get_random_bits
        self._rounder = StochasticRounder(compile_backend)
        self._device = self.param_groups[0]["params"][0].device
        self._is_fused = has_fused_adamw(self._device, torch.float32)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            lr = group["lr"]
            if not self._is_fused:
                lr = torch.tensor(lr, dtype=torch.float32).to(self._device, non_blocking=True)
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, lr, group)

    def _update(
        self, param: Tensor, gradient: Tensor, lr: float | Tensor, group: dict[str, Any]
    ) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        is_bf16 = param.dtype != torch.float32
        random_bits = None
        if is_bf16 and self._get_random_bits is not None:
            random_bits = self._get_random_bits(param)
        state["step"] += 1
        if self.found_inf is not None:
            state["step"] -= self.found_inf
        tensors = (gradient, param, state["exp_avg"], state["exp_avg_sq"])
        for rows, (grad_rows, *stored) in self._rounder.iter_chunks(*tensors):
            values = self._to_fp32("gradient", [grad_rows]) + self._to_fp32("state", stored)
            if isinstance(lr, Tensor):
                updated = compute_adamw_update(values, state["step"], lr, group)
                store_update(values[1:], updated, self.found_inf)
            else:
                fused_adamw_(values, state["step"], lr, group, self.found_inf)
            if random_bits is not None:
                self._rounder.round_(self._get_scratch_buffer("state", stored), random_bits, rows)
            if is_bf16:
                torch._foreach_copy_(stored, values[1:])

    def _to_fp32(self, slot: str, tensors: list[Tensor]) -> list[Tensor]:
        """Return tensors of one dtype unchanged if it is fp32, else fp32 copies."""
        if tensors[0].dtype == torch.float32:
            return tensors
        copies = self._get_scratch_buffer(slot, tensors).tensors
        torch._foreach_copy_(copies, tensors)
        return copies

    def _get_scratch_buffer(self, slot: str, tensors: list[Tensor]) -> ScratchBuffer:
        first = tensors[0]
        return self._rounder.get_buffer(slot, len(tensors), first.shape, first.device)
