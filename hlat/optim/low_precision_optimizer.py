"""Optimizer with separate dtypes for gradients and weights, and stochastic rounding to bf16.

Most updates are smaller than half the distance between two values of bf16, so that rounding to
nearest loses them; stochastic rounding preserves them on average (HLAT paper, section III-D). The
arithmetic is the fused kernel of the optimizer, or its update rule on a device without it, in fp32
on a few rows at a time, so that fp32 copies cost almost no memory.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hlat.optim.eager_optimizer import EagerOptimizer
from hlat.optim.update_rule import ParamGroups, UpdateRule, init_state, store_update
from hlat.precision.random_bits import RandomBits
from hlat.precision.stochastic_rounding import ScratchBuffer, StochasticRounder


class LowPrecisionOptimizer(EagerOptimizer):
    """Optimizer for fp32 or bf16 tensors, with gradients in either dtype.

    Args:
        param_groups: Parameter groups; the state has the dtype of the parameters, or after these
            tensors fp32.
        rule: Update rule, applied to chunks of rows.
        lr: Learning rate until `param_groups` have another one.
        get_random_bits: Returns the random bits that round a bf16 parameter and its state in the
            next update, given the parameter and the number of tensors; None: round to nearest.
        compile_backend: Backend of torch.compile for the rounding; None: eager operators.
    """

    def __init__(
        self,
        param_groups: ParamGroups,
        rule: UpdateRule,
        lr: float,
        get_random_bits: Callable[[Tensor, int], RandomBits] | None,
        compile_backend: str | None = None,
    ) -> None:
        super().__init__(param_groups, {"lr": lr})
        self._step_supports_amp_scaling = True
        self.found_inf: Tensor | None = None
        """1.0 to skip a step, 0.0 otherwise, as in torch's fused AdamW."""
        self._rule, self._get_random_bits = rule, get_random_bits
        self._rounder = StochasticRounder(compile_backend)
        self._device = self.param_groups[0]["params"][0].device
        has_kernel = rule.fused is not None and rule.fused.is_available(self._device, torch.float32)
        self._fused = rule.fused if has_kernel else None
        init_state(self)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            lr = group["lr"]
            if self._fused is None:
                lr = torch.tensor(lr, dtype=torch.float32).to(self._device, non_blocking=True)
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, lr, group)

    def _update(
        self, param: Tensor, gradient: Tensor, lr: float | Tensor, group: dict[str, Any]
    ) -> None:
        state, is_bf16 = self.state[param], param.dtype != torch.float32
        num_narrow = 1 + sum(state[name].dtype == param.dtype for name in group["state_names"])
        random_bits = None
        if is_bf16 and self._get_random_bits is not None:
            random_bits = self._get_random_bits(param, num_narrow)
        state["step"] += 1
        if self.found_inf is not None:
            state["step"] -= self.found_inf
        tensors = (gradient, param, *(state[name] for name in group["state_names"]))
        for rows, (grad_rows, *stored) in self._rounder.iter_chunks(*tensors):
            narrow, wide = stored[:num_narrow], stored[num_narrow:]
            values = self._to_fp32("gradient", [grad_rows]) + self._to_fp32("state", narrow) + wide
            if isinstance(lr, Tensor):
                updated = self._rule.compute(values, state["step"], lr, group)
                store_update(values[1:], updated, self.found_inf)
            else:
                assert self._fused is not None
                lists = [[one] for one in values]
                self._fused.update_(lists, [state["step"]], lr, group, self.found_inf)
            if random_bits is not None:
                self._rounder.round_(self._get_scratch_buffer("state", narrow), random_bits, rows)
            if is_bf16:
                torch._foreach_copy_(narrow, values[1 : 1 + num_narrow])

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
