"""Seeds of initial weights and of the data order."""

from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from hlat.config.resolve import resolve_config
from hlat.config.seeds import count_seeds, format_seeds, pop_seeds
from hlat.data.data_loader import build_data_loader
from hlat.engine.native.native_engine import NativeEngine


def load_first_batch(config: Any) -> np.ndarray:
    seed = config.run.resolved_data_seed
    with closing(build_data_loader(config.data, config.phase, config.batch, seed)) as loader:
        return loader.next_batch(0).tokens.copy()


def copy_weights(config: Any) -> dict[str, torch.Tensor]:
    with closing(NativeEngine()) as engine:
        engine.build(config)
        return {
            shard.name: shard.tensor.clone()
            for shard in engine.state_shards()
            if shard.name.startswith("weights/") and "norm" not in shard.name
        }


@pytest.mark.parametrize(
    ("override", "same_weights", "same_order"),
    [
        ("run.init_seed=7", False, True),
        ("run.data_seed=7", True, False),
        ("run.seed=7", False, False),
    ],
)
def test_a_seed_changes_weights_or_order_only(
    compose: Callable[..., Any],
    small: tuple[str, ...],
    override: str,
    same_weights: bool,
    same_order: bool,
) -> None:
    base, other = (resolve_config(compose(*small, *words)) for words in ((), (override,)))
    weights, others = copy_weights(base), copy_weights(other)
    assert {torch.equal(weights[name], others[name]) for name in weights} == {same_weights}
    assert np.array_equal(load_first_batch(base), load_first_batch(other)) == same_order


def test_both_default_to_the_seed_and_are_part_of_the_name(compose: Callable[..., Any]) -> None:
    base, *others = (
        resolve_config(compose(*words))
        for words in ((), ("run.init_seed=12349",), ("run.data_seed=12349",), ("run.data_seed=1",))
    )
    assert (base.run.resolved_init_seed, base.run.resolved_data_seed) == (base.run.seed,) * 2
    assert len({config.run.name for config in (base, *others)}) == 4


def test_seeds_are_no_factors() -> None:
    axes = {"run.data_seed": ["1", "2"], "optimizer.lr": ["a", "a"], "run.init_seed": ["5", "6"]}
    assert pop_seeds(axes) == ["5/1", "6/2"]
    assert axes == {"optimizer.lr": ["a", "a"]}
    assert pop_seeds(axes) == []
    assert format_seeds({"run.seed": 1, "run.data_seed": 2}) == "1/None/2"
    assert count_seeds({"run.init_seed": ["1", "2"], "run.data_seed": ["1", "2", "3"]}) == 6
    assert count_seeds({"optimizer.lr": ["1", "2"]}) == 1
