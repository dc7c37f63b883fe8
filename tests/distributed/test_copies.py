"""Every bit that differs between copies of the state is found, and its rank where most others have
another one."""

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

FLIPS = 50
LAYOUTS = ["dp=4", "dp=2", "tp=4", "tp=2 dp=2", "dp=2 zero=1", "dp=2 zero=3", "tp=2 pp=2 dp=2"]
CASES = [
    *((layout, "bf16_sr") for layout in LAYOUTS),
    *(pytest.param(layout, "mixed", marks=pytest.mark.slow) for layout in LAYOUTS[:-2]),
    *((layout, "mixed") for layout in LAYOUTS[-2:]),
]
INTEGERS = {2: torch.int16, 4: torch.int32}


def trained(config: Config, steps: int) -> NativeEngine:
    engine = NativeEngine()
    engine.build(config)
    for batch in checks.batches(config, steps):
        engine.train_step(checks.own(batch, engine), checks.RATE)
    return engine


def unlike(config: Config, steps: int) -> int:
    """How many slices differ between copies after some steps, as this rank sees it."""
    engine = trained(config, steps)
    found = engine.find_replica_mismatches()
    engine.close()
    return len(found)


def flips(config: Config, count: int) -> list[tuple[str, int, list[ReplicaMismatch]]]:
    """Flip one bit at a time in one rank's memory: where and whose it was, and what was found."""
    engine, lot = trained(config, 2), random.Random(0)
    told = []
    for _ in range(count):
        chunks = [*engine.chunks()]
        number = lot.randrange(len(chunks))
        rank, place, bit = lot.randrange(config.num_processes), lot.random(), lot.random()
        bits = chunks[number].tensor.detach()
        bits = bits.view(INTEGERS[bits.element_size()])
        index = np.unravel_index(int(place * bits.numel()), bits.shape)
        flip = torch.tensor(1).bitwise_left_shift(int(bit * 8 * bits.element_size()))
        flip = flip.to(bits.dtype) * (rank == engine.world.rank)
        bits[index] ^= flip
        found = engine.find_replica_mismatches()
        bits[index] ^= flip
        told.append((chunks[number].name, rank, found))
    assert not engine.find_replica_mismatches()
    engine.close()
    return told


@pytest.mark.parametrize(("layout", "recipe"), CASES)
def test_copies_stay_alike(ranks: Ranks, configure, layout: str, recipe: str) -> None:
    config = configure(layout, f"precision={recipe}")
    assert ranks.run(config.num_processes, unlike, config, 3) == [0] * config.num_processes


@pytest.mark.parametrize("recipe", ["bf16_sr", "mixed"])
def test_a_flipped_bit_is_found_and_its_rank_too(ranks: Ranks, configure, recipe: str) -> None:
    config = configure("dp=4", f"precision={recipe}")
    for told in ranks.run(4, flips, config, FLIPS):
        for name, rank, found in told:
            assert name in {one.name for one in found}
            assert all((one.ranks, one.odd) == ([0, 1, 2, 3], [rank]) for one in found)


def test_of_two_copies_none_is_accused(ranks: Ranks, configure) -> None:
    for told in ranks.run(2, flips, configure("dp=2"), FLIPS):
        for name, _, found in told:
            assert name in {one.name for one in found}
            assert all((one.ranks, one.odd) == ([0, 1], []) for one in found)


def test_copies_of_key_value_heads_are_compared(ranks: Ranks, configure) -> None:
    """Of four tensor-parallel ranks each pair holds one head; all four hold norms."""
    found = {"k_proj": set(), "q_proj": set(), "norm": set()}
    for told in ranks.run(4, flips, configure("tp=4"), 4 * FLIPS):
        for name, _, differing in told:
            for part, holders in found.items():
                if part in name and not name.startswith("updates/"):  # which all ranks count
                    holders |= {tuple(one.ranks) for one in differing}
    assert found == {"k_proj": {(0, 1), (2, 3)}, "q_proj": set(), "norm": {(0, 1, 2, 3)}}
