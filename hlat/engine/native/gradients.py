"""Sums of gradients over micro batches, in the dtype that the recipe says.

Autograd can add up gradients by itself, in their own dtype and rounded to nearest. A recipe that
wants another dtype or rounding takes each gradient away as soon as it is there, so that what it
costs in memory is one gradient and not all of them.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from hlat.engine.native.fully_sharded import local
from hlat.engine.native.noise import Draw
from hlat.engine.native.rounding import Rounding

Draws = Callable[[str, int], Draw]
"""The bits that round a parameter's sum after a micro batch, by name and the batch's ordinal."""


def watch(
    weights: Mapping[str, nn.Parameter], hear: Callable[[str, Tensor], None]
) -> Callable[[], None]:
    """Tell of each gradient as soon as it is there, by name, until what is returned is called.

    A weight and what watches it hold each other in a way that no garbage collector sees through.
    """
    handles = [
        weight.register_post_accumulate_grad_hook(partial(hear, name))  # type: ignore[no-untyped-call]
        for name, weight in weights.items()
    ]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


class GradientSums:
    """What a step's backward passes have given so far, by parameter."""

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        dtype: torch.dtype,
        draws: Draws | None,
        compiled: bool = False,
    ) -> None:
        """Watch the weights of a model.

        Args:
            weights: By parameter name.
            dtype: Of the sums.
            draws: For sums in bf16 that are rounded stochastically.
            compiled: Whether TorchInductor rounds.
        """
        self._dtype, self._draws, self._rounding = dtype, draws, Rounding(compiled)
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self.close = watch(weights, self._add)

    def of(self, name: str) -> Tensor:
        """The sum of a parameter so far."""
        return self._sums[name]

    def take(self) -> dict[str, Tensor]:
        """The sums of a step, by parameter name, which begin anew with it."""
        sums, self._sums, self._counts = self._sums, {}, {}
        return sums

    def _add(self, name: str, weight: Tensor) -> None:
        assert weight.grad is not None
        gradient, weight.grad = local(weight.grad), None
        count = self._counts[name] = self._counts.get(name, 0) + 1
        if count == 1:
            self._sums[name] = gradient.to(self._dtype)
        elif self._draws is None:
            for _, (total, part) in self._rounding.chunks(self._sums[name], gradient):
                total += part  # of which a CPU makes a copy in fp32
        else:
            self._rounding.add(self._sums[name], gradient, self._draws(name, count))
