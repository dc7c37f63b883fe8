"""The weights of a model as a precision recipe keeps them, and what updates them.

A recipe decides how many copies of a weight there are, what is summed and stored in which dtype and
how it is rounded. All of it is here, so that a step reads the same for every recipe: backward,
gradients, clip, update.
"""

import torch
from torch import Tensor, nn

from hlat import optimizer
from hlat.config.precision import Dtype, Rounding
from hlat.config.run import Config
from hlat.engine.native import noise
from hlat.engine.native.chunked_adamw import ChunkedAdamW
from hlat.engine.native.gradients import GradientSums
from hlat.precision import rounds_by_itself

DTYPES = {Dtype.fp32: torch.float32, Dtype.bf16: torch.bfloat16}
MOMENTS = ("exp_avg", "exp_avg_sq")
_DRAWS_PER_STEP = 1 << 20
_UPDATE, _COPY = 0, 1
"""Which draw of a step rounds what; those of GradientSums, numbered by micro batch, begin at 2."""


class Weights:
    """Weights by parameter name of llama.Llama: their copies, gradients and optimizer."""

    def __init__(self, model: nn.Module, config: Config) -> None:
        """Make copies, state and sums; weights are whatever memory holds.

        Args:
            model: Its parameters lie on one device, in the recipe's dtype.
            config: Recipe, optimizer, shape of the model and seed.
        """
        precision = config.precision
        self._computing: dict[str, nn.Parameter] = dict(model.named_parameters())
        self._noise, self._rounding = self._make_noise(config), noise.Rounding()
        self._sums = self._make_sums(config)
        self._copied = precision.master_weights is not None
        self._holders: dict[str, Tensor] = dict(self._computing)
        """What the optimizer is given: tensors of their own, unless autograd adds up gradients."""
        if precision.master_weights is not None:
            dtype = DTYPES[precision.master_weights]
            self._holders = {
                name: torch.empty_like(weight, dtype=dtype, requires_grad=False)
                for name, weight in self._computing.items()
            }
        elif self._sums is not None:
            self._holders = {name: weight.detach() for name, weight in self._computing.items()}
        self._optimizer = self._make_optimizer(config)
        self._make_moments(DTYPES[precision.accumulation])

    @property
    def updated(self) -> dict[str, Tensor]:
        """What the optimizer updates: the master weights, or without them the weights."""
        return {name: holder.detach() for name, holder in self._holders.items()}

    def state(self, name: str) -> dict[str, Tensor]:
        """The optimizer's state of a parameter: MOMENTS and step, the count of its updates."""
        state: dict[str, Tensor] = self._optimizer.state[self._holders[name]]
        return state

    def gradients(self) -> list[Tensor]:
        """The gradients that the backward passes of this step have added up."""
        if self._sums is not None:
            for name, gradient in self._sums.take().items():
                self._holders[name].grad = gradient
        return [holder.grad for holder in self._holders.values() if holder.grad is not None]

    def update(self, learning_rate: float) -> None:
        """Update by the gradients and drop them."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy master weights, where a recipe has them, to the weights that the model reads.

        The copy depends on nothing else but the count of updates, so it may be repeated at will.
        """
        if not self._copied:
            return
        for name, weight in self._computing.items():
            master = self._holders[name]
            if self._noise is None:
                weight.copy_(master)
            else:
                self._rounding.write(weight, master, self._draw(name, _COPY))

    def _draw(self, name: str, number: int) -> noise.Draw:
        assert self._noise is not None
        updates = self.state(name)["step"].to(torch.int64)
        return self._noise[name].draw(updates * _DRAWS_PER_STEP + number)

    def _make_noise(self, config: Config) -> dict[str, noise.Noise] | None:
        device = next(iter(self._computing.values())).device
        stochastic = config.precision.rounding is Rounding.stochastic
        if not stochastic or rounds_by_itself(device.type):
            return None
        return noise.make_noise(config.model, config.run.seed, self._computing)

    def _make_sums(self, config: Config) -> GradientSums | None:
        """None where autograd's own sums are what the recipe asks for."""
        precision = config.precision
        in_place = precision.accumulation is precision.gradients and self._noise is None
        if in_place and precision.master_weights is None:
            return None
        rounded = self._noise is not None and precision.accumulation is Dtype.bf16
        draw = self._draw if rounded else None
        return GradientSums(self._computing, DTYPES[precision.accumulation], draw)

    def _make_optimizer(self, config: Config) -> torch.optim.Optimizer:
        holders, precision = self._holders, config.precision
        one_dtype = precision.accumulation is (precision.master_weights or precision.weights)
        if one_dtype and (self._noise is None or self._copied):
            return optimizer.build(config.optimizer, holders.values())
        for holder in holders.values():
            holder.grad_dtype = DTYPES[precision.accumulation]
        names = {weight: name for name, weight in holders.items()}
        draw = None if self._noise is None else lambda weight: self._draw(names[weight], _UPDATE)
        groups = optimizer.groups(config.optimizer, holders.values())
        return ChunkedAdamW(groups, draw, **optimizer.settings(config.optimizer))

    def _make_moments(self, dtype: torch.dtype) -> None:
        """Let the optimizer make its state: an update with zero gradients at rate zero."""
        for holder in self._holders.values():
            holder.grad = torch.zeros_like(holder, dtype=dtype)
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        for state in self._optimizer.state.values():
            state["step"].zero_()
