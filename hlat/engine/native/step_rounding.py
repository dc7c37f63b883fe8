"""Rounding in one optimizer step: of gradient sums, updates, and copies of master weights."""

from collections.abc import Callable

import torch
from torch import Tensor

from hlat.config.run import Config
from hlat.distributed.parameter_shards import ParameterShard
from hlat.engine.native.sharded_parameters import ShardedParameters
from hlat.precision.random_bits import (
    RandomBits,
    RandomBitsGenerator,
    build_random_bits_generator,
)
from hlat.precision.record_range import record_range
from hlat.precision.stochastic_rounding import StochasticRounder

_COUNTERS_PER_STEP = 1 << 20
_COPY_COUNTER = 3
"""Counter of the copy of a master weight; 0 to 2 are those of the weight and its first tensors."""
_FIRST_ACCUMULATION_COUNTER = 4
"""The 1-based global index of the micro batch is added to it."""


class NearestRounding:
    """Rounding to nearest."""

    def __init__(self, compile_backend: str | None = None) -> None:
        self._rounder = StochasticRounder(compile_backend)

    def add_(self, name: str, micro_batch: int, total: Tensor, gradient: Tensor) -> None:
        """Add the gradient of a micro batch to the sum, given its 1-based index on this rank."""
        # A CPU casts a copy to fp32, so chunks bound its memory
        for _, (total_rows, gradient_rows) in self._rounder.iter_chunks(total, gradient):
            total_rows += gradient_rows

    @record_range("rounding")
    def copy_(self, name: str, target: Tensor, source: Tensor) -> None:
        """Copy the updated rows of a master weight to the model."""
        target.copy_(source)


class StochasticRounding(NearestRounding):
    """Emulated stochastic rounding to bf16; repeated calls in a step give identical results.

    `get_step_count` returns the number of updates of a parameter, a tensor on its device.
    """

    def __init__(
        self,
        params: ShardedParameters,
        config: Config,
        get_step_count: Callable[[str], Tensor],
        compile_backend: str | None = None,
    ) -> None:
        super().__init__(compile_backend)
        self._params, self._get_step_count = params, get_step_count
        self._seed = config.run.seed
        self._rank = params.sharding.accumulation_rank
        self._first_micro_batch = 0
        self._generators = {
            name: build_shard_generator(local.shard, config.run.seed, local.param.device)
            for name, local in params.local_params.items()
            if local.shard.rows
        }

    def start_step(self, num_micro_batches: int) -> None:
        """Set the number of micro batches of each data-parallel rank in the next step."""
        self._first_micro_batch = self._rank * num_micro_batches

    @record_range("rounding")
    def add_(self, name: str, micro_batch: int, total: Tensor, gradient: Tensor) -> None:
        """Add a gradient to the sum; the bits depend on the global index of the micro batch."""
        counter = _FIRST_ACCUMULATION_COUNTER + self._first_micro_batch + micro_batch
        bits = self._generate(name, counter, slice(None))
        self._rounder.add_rounded_(total, gradient, bits)

    @record_range("rounding")
    def copy_(self, name: str, target: Tensor, source: Tensor) -> None:
        """Copy the updated rows of a master weight to the model."""
        bits = self._generate(name, _COPY_COUNTER, self._params.updated_rows[name])
        self._rounder.copy_rounded_(target, source, bits)

    @record_range("rounding")
    def get_update_bits(self, name: str, num_tensors: int) -> RandomBits:
        """Return the bits that round the updated rows of a parameter and its optimizer state."""
        index = torch.arange(num_tensors, device=self._params.local_params[name].param.device)
        counters = torch.where(index < _COPY_COUNTER, index, _COUNTERS_PER_STEP - index)
        return self._generate(name, counters, self._params.updated_rows[name])

    def build_matrix_bits(
        self, name: str, shape: tuple[int, ...], index: int, step: Tensor
    ) -> RandomBits:
        """Return the bits that round a tensor of a canonical matrix's state after `step` updates.

        Args:
            name: Name of the matrix.
            shape: Shape of the tensor, which has two dimensions.
            index: Index of the tensor in the state.
            step: Number of updates.
        """
        generator = build_random_bits_generator(
            [(name, 0, shape[0])], (0, shape[1]), self._seed, step.device
        )
        counters = torch.arange(1 + index, 2 + index, device=step.device)
        return generator.generate(step.to(torch.int64) * _COUNTERS_PER_STEP + counters)

    def _generate(self, name: str, counters: Tensor | int, rows: slice) -> RandomBits:
        first = self._get_step_count(name).to(torch.int64) * _COUNTERS_PER_STEP
        return self._generators[name].select_rows(rows).generate(first + counters)


def build_shard_generator(
    shard: ParameterShard, seed: int, device: torch.device
) -> RandomBitsGenerator:
    """Return the random bits generator of a shard."""
    row_ranges = [(rows.name, rows.start, rows.num_rows) for rows in shard.rows]
    return build_random_bits_generator(row_ranges, shard.columns, seed, device)
