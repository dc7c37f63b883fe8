"""Random bits of one optimizer step: updates, copies of master weights, and accumulation."""

from collections.abc import Callable

import torch
from torch import Tensor

from hlat.engine.native.sharded_parameters import ShardedParameters
from hlat.engine.parameter_shards import ParameterShard
from hlat.precision.random_bits import (
    RandomBits,
    RandomBitsGenerator,
    build_random_bits_generator,
)

_COUNTERS_PER_STEP = 1 << 20
_UPDATE_COUNTERS, _COPY_COUNTERS = range(3), range(3, 4)
"""Counters of a step for the weight and its moments, and for the copy of a master weight."""
_FIRST_ACCUMULATION_COUNTER = 4
"""The 1-based global index of the micro batch is added to it."""


class StepRandomBits:
    """Random bits by parameter, purpose and step.

    Args:
        params: Parameters of this rank.
        seed: Seed of the run.
        num_micro_batches: Micro batches per step and rank.
        get_step_count: Returns the number of updates of a parameter, a tensor on its device.
    """

    def __init__(
        self,
        params: ShardedParameters,
        seed: int,
        num_micro_batches: int,
        get_step_count: Callable[[str], Tensor],
    ) -> None:
        self._params, self._get_step_count = params, get_step_count
        sharding = params.sharding
        dp_rank = 0 if sharding.is_fsdp else sharding.axis.rank
        self._first_micro_batch = dp_rank * num_micro_batches
        self._generators = {
            name: build_shard_generator(local.shard, seed, local.param.device)
            for name, local in params.local_params.items()
            if local.shard.rows
        }

    def get_update_bits(self, name: str) -> RandomBits:
        """Return the bits that round the updated rows of a parameter and its moments."""
        return self._generate(name, _UPDATE_COUNTERS, self._params.updated_rows[name])

    def get_copy_bits(self, name: str) -> RandomBits:
        """Return the bits that round the copy of the updated rows of a master weight."""
        return self._generate(name, _COPY_COUNTERS, self._params.updated_rows[name])

    def get_accumulation_bits(self, name: str, micro_batch: int) -> RandomBits:
        """Return the bits that round a gradient sum; they depend on the global micro batch only.

        Args:
            name: Parameter name.
            micro_batch: 1-based index of the micro batch on this rank.
        """
        counter = _FIRST_ACCUMULATION_COUNTER + self._first_micro_batch + micro_batch
        return self._generate(name, range(counter, counter + 1), slice(None))

    def _generate(self, name: str, counters: range, rows: slice) -> RandomBits:
        first = self._get_step_count(name).to(torch.int64) * _COUNTERS_PER_STEP
        offsets = torch.arange(counters.start, counters.stop, device=first.device)
        return self._generators[name].select_rows(rows).generate(first + offsets)


def build_shard_generator(
    shard: ParameterShard, seed: int, device: torch.device
) -> RandomBitsGenerator:
    """Return the random bits generator of a shard."""
    row_ranges = [(rows.name, rows.start, rows.num_rows) for rows in shard.rows]
    return build_random_bits_generator(row_ranges, shard.columns, seed, device)
