"""The weights of a rank as a precision recipe keeps them, and what updates them.

A recipe decides how many copies of a weight there are, what is summed and stored in which dtype and
how it is rounded; ZeRO decides which rows this rank updates. All of it is here, so that a step
reads the same for every recipe and layout: backward, gradients, clip, update.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hlat import optimizer
from hlat.config.precision import Dtype, Rounding
from hlat.config.run import Config
from hlat.engine.dtypes import DTYPES
from hlat.engine.native import noise, rounding
from hlat.engine.native.chunked_adamw import ChunkedAdamW
from hlat.engine.native.gradients import GradientSums
from hlat.engine.native.mesh import Mesh
from hlat.engine.native.replicas import Reducer, Replicas, Sum
from hlat.engine.shards import Shard
from hlat.precision import rounds_by_itself

MOMENTS = ("exp_avg", "exp_avg_sq")
_DRAWS_PER_STEP = 1 << 20
_UPDATE, _COPY = range(3), range(3, 4)
"""Which draws of a step round what: the weight and its moments; a copy of the weight."""
_SUMS = 4
"""The first draw of GradientSums, whose number that of the micro batch is added to."""


@dataclass(frozen=True)
class Weight:
    """One parameter of this rank.

    Attributes:
        computing: What the model reads.
        memory: The same, with the rows that ZeRO may need beyond it.
        shard: What it holds.
    """

    computing: nn.Parameter
    memory: Tensor
    shard: Shard


class Weights:
    """Weights by parameter name of llama.Llama: their copies, gradients and optimizer."""

    def __init__(
        self, weights: Mapping[str, Weight], config: Config, mesh: Mesh, trains: bool = True
    ) -> None:
        """Make copies, state and sums; weights are whatever memory holds.

        Args:
            weights: On one device, in the recipe's dtype.
            config: Recipe, layout, optimizer, shape of the model and seed.
            mesh: The other ranks.
            trains: Whether they are ever updated; else they are all that there is.
        """
        precision = config.precision
        self.held, self._precision, self._mesh = weights, precision, mesh
        """What this rank holds."""
        self._replicas = Replicas(mesh.dp, config.parallelism.zero)
        self._own = {
            name: self._replicas.own(weight.shard.shape) for name, weight in weights.items()
        }
        self._computing = {name: weight.computing for name, weight in weights.items()}
        self._compiled = config.compiler.inductor
        self._noise = self._make_noise(config) if trains else None
        self._rounding = rounding.Rounding(self._compiled)
        self._num_micro_batches = config.num_micro_batches
        self._sums = self._make_sums() if trains else None
        self._reducer = self._make_reducer() if trains else None
        self._copied = trains and bool(precision.master_weights) and not self._replicas.shared
        self._holders = self._make_holders()
        """What the optimizer is given: tensors of their own, unless autograd adds up gradients."""
        self.shards = {name: self._updated_part(name) for name in self._holders}
        """What each of `updated` holds."""
        self._optimizer = None
        if trains:
            self._optimizer = self._make_optimizer(config)
            self._make_moments(self._optimizer, DTYPES[precision.accumulation])

    def close(self) -> None:
        """Let go of the model's weights."""
        for watcher in (self._sums, self._reducer):
            if watcher is not None:
                watcher.close()

    @property
    def shared(self) -> bool:
        """Whether data-parallel ranks hold each weight together."""
        return self._replicas.shared

    @property
    def updated(self) -> dict[str, Tensor]:
        """What the optimizer updates: the master weights, or without them the weights."""
        return {name: holder.detach() for name, holder in self._holders.items()}

    @property
    def trains(self) -> bool:
        """Whether there is anything that updates them."""
        return self._optimizer is not None

    def state(self, name: str) -> dict[str, Tensor]:
        """The optimizer's state of a parameter: MOMENTS and step, the count of its updates."""
        assert self._optimizer is not None
        state: dict[str, Tensor] = self._optimizer.state[self._holders[name]]
        return state

    def gradients(self) -> dict[str, Tensor]:
        """The gradients that all backward passes of this step have added up, on all ranks."""
        if self._reducer is not None:
            sums = self._reducer.finish()
            self._sum_vectors(sums)
            for name, weight in self._computing.items():
                weight.grad = None
                if name in self._holders:
                    self._holders[name].grad = sums[name].to(DTYPES[self._precision.accumulation])
        if self._sums is not None:
            for name, gradient in self._sums.take().items():
                if self._reducer is None:
                    self._holders[name].grad = gradient
        return {name: h.grad for name, h in self._holders.items() if h.grad is not None}

    def counted(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Of tensors of what is updated, the rows that no other rank counts in a norm."""
        return [
            tensor[: self.shards[name].num_owned]
            for name, tensor in tensors.items()
            if self.counts(name) and self.shards[name].num_owned
        ]

    def counts(self, name: str) -> bool:
        """Whether of all data-parallel ranks with the same rows, this one is to count them."""
        return self._replicas.counts(self.held[name].shard.shape[0], self._own[name])

    def update(self, learning_rate: float, skip: Tensor) -> None:
        """Update by the gradients and drop them.

        Args:
            learning_rate: Of this update.
            skip: Whether to change nothing, weights, moments and counts, to the last bit; bool.
        """
        assert self._optimizer is not None
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step(self._optimizer, skip)
        self._optimizer.zero_grad(set_to_none=True)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Let the weights that the model reads follow what was updated, here and on other ranks.

        A copy of master weights depends on nothing else but the count of updates, so it may be
        repeated at will.
        """
        for name, weight in self.held.items():
            if self._copied and name in self._holders:
                self._copy(name, weight.memory[self._own[name]])
            self._replicas.share(weight.memory)

    def _copy(self, name: str, weight: Tensor) -> None:
        master = self._holders[name]
        if self._noise is None:
            weight.copy_(master)
        else:
            self._rounding.write(weight, master, self._draw(name, _COPY, self._own[name]))

    def _sum_vectors(self, sums: dict[str, Tensor]) -> None:
        """Under sequence parallelism a norm's gradient is of this rank's tokens: add them up."""
        if not self._mesh.sequence_parallel:
            return
        vectors = [tensor for tensor in sums.values() if tensor.dim() == 1]
        every = torch.cat(vectors)
        self._mesh.tp.sum_(every)
        torch._foreach_copy_(vectors, list(torch.split(every, [len(vector) for vector in vectors])))

    def _draw(self, name: str, numbers: range, rows: slice = slice(None)) -> noise.Draw:
        assert self._noise is not None
        first = self._updates(name).to(torch.int64) * _DRAWS_PER_STEP
        every = torch.arange(numbers.start, numbers.stop, device=first.device)
        return self._noise[name].cut(rows).draw(first + every)

    def _draw_sum(self, name: str, count: int) -> noise.Draw:
        """Micro batches have the same numbers, whichever rank of however many runs them."""
        rank = 0 if self._replicas.shared else self._mesh.dp.rank
        number = _SUMS + rank * self._num_micro_batches + count
        return self._draw(name, range(number, number + 1))

    def _updates(self, name: str) -> Tensor:
        """The count of updates, the same for all; this rank may update nothing of a parameter."""
        held = name if name in self._holders else next(iter(self._holders))
        return self.state(held)["step"]

    def _updated_part(self, name: str) -> Shard:
        rows = self._own[name]
        return self.held[name].shard.cut(rows.start, rows.stop)

    def _make_noise(self, config: Config) -> dict[str, noise.Noise] | None:
        device = next(iter(self._computing.values())).device
        stochastic = config.precision.rounding is Rounding.stochastic
        if not stochastic or rounds_by_itself(device.type):
            return None
        return {
            name: noise.make_noise(weight.shard, config.run.seed, device)
            for name, weight in self.held.items()
            if weight.shard.rows
        }

    def _make_sums(self) -> GradientSums | None:
        """None where autograd's own sums are what the recipe asks for."""
        precision = self._precision
        in_place = precision.accumulation is precision.gradients and self._noise is None
        if in_place and precision.master_weights is None and not self._replicas.shared:
            return None
        rounded = self._noise is not None and precision.accumulation is Dtype.bf16
        draw = self._draw_sum if rounded else None
        return GradientSums(self._computing, DTYPES[precision.accumulation], draw, self._compiled)

    def _make_reducer(self) -> Reducer | None:
        """None where no other rank has a part in any gradient."""
        mesh = self._mesh
        if mesh.dp.size == mesh.kv.size == 1 and not mesh.sequence_parallel:
            return None
        return Reducer(self._computing, self._complete, self._start, self._num_micro_batches)

    def _complete(self, name: str) -> Tensor:
        """The gradient of a parameter over all micro batches, in the dtype of the reduction."""
        gradient = self._computing[name].grad if self._sums is None else self._sums.of(name)
        assert gradient is not None
        gradient = gradient.to(DTYPES[self._precision.reduction])
        if self._mesh.kv.size > 1 and name.endswith(".qkv_proj.weight"):
            rows = self.held[name].shard.rows
            self._mesh.kv.sum_(
                gradient[sum(part.count for part in rows if "q_proj" in part.name) :]
            )
        return gradient

    def _start(self, gradient: Tensor) -> Sum:
        return self._replicas.start_sum(gradient)

    def _make_holders(self) -> dict[str, Tensor]:
        master = self._precision.master_weights if self._copied else None
        cut = self._replicas.cuts or self._replicas.shared
        if master is None and self._sums is None and not cut:
            return dict(self._computing)
        holders = {}
        for name, weight in self.held.items():
            held = weight.memory.detach()[self._own[name]]
            if master is not None:
                held = torch.empty_like(held, dtype=DTYPES[master])
            if held.numel():
                holders[name] = held
        return holders

    def _make_optimizer(self, config: Config) -> torch.optim.Optimizer:
        holders, precision = self._holders, config.precision
        one_dtype = precision.accumulation is (precision.master_weights or precision.weights)
        if one_dtype and (self._noise is None or self._copied):
            return optimizer.build(config.optimizer, holders.values())
        for holder in holders.values():
            holder.grad_dtype = DTYPES[precision.accumulation]
        names = {weight: name for name, weight in holders.items()}

        def draw(weight: Tensor) -> noise.Draw:
            name = names[weight]
            return self._draw(name, _UPDATE, self._own[name])

        groups = optimizer.groups(config.optimizer, holders.values())
        return ChunkedAdamW(
            groups,
            None if self._noise is None else draw,
            self._compiled,
            **optimizer.settings(config.optimizer),
        )

    def _make_moments(self, made: torch.optim.Optimizer, dtype: torch.dtype) -> None:
        """Let the optimizer make its state: an update with zero gradients at rate zero."""
        for holder in self._holders.values():
            holder.grad = torch.zeros_like(holder, dtype=dtype)
        for group in made.param_groups:
            group["lr"] = 0.0
        made.step()
        made.zero_grad(set_to_none=True)
        for state in made.state.values():
            state["step"].zero_()
