"""Accumulation of gradients over micro batches in the dtype of the recipe.

autograd accumulates in the dtype of the gradients and rounds to nearest. For another dtype or
rounding, a hook accumulates each gradient as soon as it is computed, so that only one gradient at a
time exists besides the sums.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from hlat.engine.native.fsdp import to_local
from hlat.precision.random_bits import RandomBits
from hlat.precision.stochastic_rounding import StochasticRounder

RandomBitsFn = Callable[[str, int], RandomBits]
"""Returns the bits that round a sum, given parameter name and 1-based index of the micro batch."""


def register_grad_hooks(
    params: Mapping[str, nn.Parameter], hook: Callable[[str, Tensor], None]
) -> Callable[[], None]:
    """Call `hook` with name and parameter after each accumulation; return a function to remove it.

    Hooks must be removed: parameter and hook form a reference cycle that the garbage collector does
    not see.
    """
    handles = [
        param.register_post_accumulate_grad_hook(partial(hook, name))  # type: ignore[no-untyped-call]
        for name, param in params.items()
    ]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


class GradientSource(Protocol):
    """Gradients of one step by parameter name."""

    def pop_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the step and start the next one."""

    def close(self) -> None:
        """Remove the hooks from the parameters."""


class AutogradAccumulator:
    """Gradients that autograd accumulates in the parameters."""

    def __init__(self, params: Mapping[str, nn.Parameter]) -> None:
        self._params = params

    def get_gradient(self, name: str) -> Tensor:
        """Return the current sum of a parameter."""
        gradient = self._params[name].grad
        assert gradient is not None
        return gradient

    def pop_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the step and clear them in the parameters."""
        gradients = {name: self.get_gradient(name) for name in self._params}
        for param in self._params.values():
            param.grad = None
        return gradients

    def close(self) -> None:
        """Do nothing: autograd needs no hooks."""


class GradientAccumulator(AutogradAccumulator):
    """Gradients accumulated by hooks, in another dtype or with stochastic rounding.

    Args:
        params: Parameters by name.
        dtype: Dtype of the sums.
        get_random_bits: Random bits of sums that are rounded stochastically to bf16, or None.
        compiled: Round with TorchInductor.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        dtype: torch.dtype,
        get_random_bits: RandomBitsFn | None,
        compiled: bool = False,
    ) -> None:
        super().__init__(params)
        self._dtype, self._get_random_bits = dtype, get_random_bits
        self._rounder = StochasticRounder(compiled)
        self._gradients: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._remove_hooks = register_grad_hooks(params, self._accumulate)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        self._remove_hooks()

    def get_gradient(self, name: str) -> Tensor:
        """Return the current sum of a parameter."""
        return self._gradients[name]

    def pop_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the step and start the next one."""
        gradients, self._gradients, self._counts = self._gradients, {}, {}
        return gradients

    def _accumulate(self, name: str, param: Tensor) -> None:
        assert param.grad is not None
        gradient, param.grad = to_local(param.grad), None
        count = self._counts[name] = self._counts.get(name, 0) + 1
        if count == 1:
            self._gradients[name] = gradient.to(self._dtype)
        elif self._get_random_bits is None:
            # A CPU casts a copy to fp32, so chunks bound its memory
            for _, (total, part) in self._rounder.iter_chunks(self._gradients[name], gradient):
                total += part
        else:
            bits = self._get_random_bits(name, count)
            self._rounder.add_rounded_(self._gradients[name], gradient, bits)
