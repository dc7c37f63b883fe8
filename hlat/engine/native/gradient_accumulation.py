"""Accumulation of gradients over micro batches in the dtype of the recipe.

autograd accumulates in the dtype of the gradients and rounds to nearest. For another dtype or
rounding, a hook accumulates each gradient as soon as it is computed, so that only one gradient at a
time exists besides the sums.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hlat.engine.native.fsdp import to_local
from hlat.engine.native.step_rounding import NearestRounding


def register_grad_hooks(
    params: Mapping[str, nn.Parameter], hook: Callable[[str, Tensor], None]
) -> list[RemovableHandle]:
    """Call `hook` with name and parameter after each accumulation; return the handles.

    Hooks must be removed: parameter and hook form a reference cycle that the garbage collector does
    not see.
    """
    return [
        param.register_post_accumulate_grad_hook(partial(hook, name))  # type: ignore[no-untyped-call]
        for name, param in params.items()
    ]


class AutogradAccumulator:
    """Gradients that autograd accumulates in the parameters."""

    def __init__(self, params: Mapping[str, nn.Parameter]) -> None:
        self._params = params
        self._handles: list[RemovableHandle] = []

    def get_gradient(self, name: str) -> Tensor:
        """Return the current sum of a parameter.

        Raises:
            RuntimeError: The loss does not depend on the parameter.
        """
        gradient = self._find_gradient(name)
        if gradient is None:
            raise RuntimeError(
                f"parameter {name} has no gradient, so the loss does not depend on it; use it in "
                "the forward pass without detaching it, or remove it from the component"
            )
        return gradient

    def _find_gradient(self, name: str) -> Tensor | None:
        return self._params[name].grad

    def pop_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the step and start the next one."""
        gradients = {name: self.get_gradient(name) for name in self._params}
        for param in self._params.values():
            param.grad = None
        return gradients

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()


class GradientAccumulator(AutogradAccumulator):
    """Gradients accumulated by hooks, in another dtype or with another rounding."""

    def __init__(
        self, params: Mapping[str, nn.Parameter], dtype: torch.dtype, rounding: NearestRounding
    ) -> None:
        super().__init__(params)
        self._dtype, self._rounding = dtype, rounding
        self._gradients: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._handles = register_grad_hooks(params, self._accumulate)

    def _find_gradient(self, name: str) -> Tensor | None:
        return self._gradients.get(name)

    def pop_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the step and start the next one."""
        gradients = {name: self.get_gradient(name) for name in self._params}
        self._gradients, self._counts = {}, {}
        return gradients

    def _accumulate(self, name: str, param: Tensor) -> None:
        assert param.grad is not None
        gradient, param.grad = to_local(param.grad), None
        count = self._counts[name] = self._counts.get(name, 0) + 1
        if count == 1:
            self._gradients[name] = gradient.to(self._dtype)
        else:
            self._rounding.add_(name, count, self._gradients[name], gradient)
