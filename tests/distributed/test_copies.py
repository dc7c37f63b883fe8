"""Each bit that differs between replicas of the state is found, and its rank if most others agree."""

import random

import numpy as np
import pytest
import torch

from hlat.config.run import Config
from hlat.engine.interface import ReplicaMismatch
from hlat.engine.native.native_engine import NativeEngine
from tests.distributed import checks
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("processes")]

FLIPS = 20
LAYOUTS = ["dp=4", "dp=2", "tp=4", "tp=2 dp=2", "dp=2 zero=1", "dp=2 zero=3", "tp=2 pp=2 dp=2"]
LAYOUTS += ["dp=4 zero=3 dp_replicate=2", "dp=4 zero=1 dp_replicate=2"]
DEFAULT = {("tp=2 dp=2", "bf16_sr"), ("dp=2 zero=1", "mixed"), ("dp=2 zero=3", "mixed")}
DEFAULT |= {("tp=2 pp=2 dp=2", "bf16_sr")}
CASES = [
    pytest.param(*case, marks=[] if case in DEFAULT else [pytest.mark.slow])
    for recipe in ("bf16_sr", "mixed")
    for layout in LAYOUTS
    for case in [(layout, recipe)]
]
INTEGERS = {2: torch.int16, 4: torch.int32}


def build_and_train(config: Config, steps: int) -> NativeEngine:
    engine = NativeEngine()
    engine.build(config)
    for batch in checks.batches(config, steps):
        engine.train_step(checks.shard_batch(batch, engine), checks.RATE)
    return engine


def count_mismatches(config: Config, steps: int) -> int:
    """Return the number of slices that differ between replicas after some steps."""
    engine = build_and_train(config, steps)
    found = engine.find_replica_mismatches()
    engine.close()
    return len(found)


def flip_bits(
    config: Config, count: int, parts: tuple[str, ...] = ("",)
) -> list[tuple[str, int, list[ReplicaMismatch]]]:
    """Flip one bit at a time on one rank; return its tensor, its rank and the mismatches found."""
    engine, rng = build_and_train(config, 2), random.Random(0)
    results = []
    for _ in range(count):
        shards = [c for c in engine.state_shards() if any(part in c.name for part in parts)]
        number = rng.randrange(len(shards))
        rank, position, bit = rng.randrange(config.num_processes), rng.random(), rng.random()
        bits = shards[number].tensor.detach()
        bits = bits.view(INTEGERS[bits.element_size()])
        index = np.unravel_index(int(position * bits.numel()), bits.shape)
        flip = torch.tensor(1).bitwise_left_shift(int(bit * 8 * bits.element_size()))
        flip = flip.to(bits.dtype) * (rank == engine.parallel_state.rank)
        bits[index] ^= flip
        found = engine.find_replica_mismatches()
        bits[index] ^= flip
        results.append((shards[number].name, rank, found))
    assert not engine.find_replica_mismatches()
    engine.close()
    return results


@pytest.mark.parametrize(("layout", "recipe"), CASES)
@pytest.mark.slow_after(2)
def test_replicas_stay_identical(ranks: Ranks, configure, layout: str, recipe: str) -> None:
    config = configure(layout, f"precision={recipe}")
    assert (
        ranks.run(config.num_processes, count_mismatches, config, 2) == [0] * config.num_processes
    )


@pytest.mark.parametrize("recipe", ["bf16_sr", pytest.param("mixed", marks=pytest.mark.slow)])
def test_flipped_bit_and_its_rank_are_found(ranks: Ranks, configure, recipe: str) -> None:
    config = configure("dp=4", f"precision={recipe}")
    for results in ranks.run(4, flip_bits, config, FLIPS):
        for name, rank, found in results:
            assert name in {one.name for one in found}
            assert all((one.ranks, one.odd) == ([0, 1, 2, 3], [rank]) for one in found)


@pytest.mark.slow
def test_of_two_replicas_neither_rank_is_named(ranks: Ranks, configure) -> None:
    for results in ranks.run(2, flip_bits, configure("dp=2"), FLIPS):
        for name, _, found in results:
            assert name in {one.name for one in found}
            assert all((one.ranks, one.odd) == ([0, 1], []) for one in found)


@pytest.mark.slow
def test_replicated_key_value_heads_are_compared(ranks: Ranks, configure) -> None:
    """Expect each head on two of four tensor-parallel ranks, and the norms on all four."""
    found = {"k_proj": set(), "q_proj": set(), "norm": set()}
    for results in ranks.run(4, flip_bits, configure("tp=4"), 2 * FLIPS, (*found,)):
        for name, _, differing in results:
            for part, holders in found.items():
                if part in name and not name.startswith("updates/"):  # counted by all ranks
                    holders |= {tuple(one.ranks) for one in differing}
    assert found == {"k_proj": {(0, 1), (2, 3)}, "q_proj": set(), "norm": {(0, 1, 2, 3)}}
