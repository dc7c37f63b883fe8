"""Averaged weights are those of one process in every layout, and are resumed in another one."""

import numpy as np
import pytest

from hlat.config.run import Config
from hlat.engine.native.native_engine import NativeEngine
from tests.distributed import checks
from tests.distributed.checks import layers
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("processes")]

EMA = ["optimizer.ema_decay=0.75"]
SCHEDULE_FREE = ["optimizer=schedule_free", "schedule=constant"]
STEPS = 3
LAYOUTS = {
    "tp2+sp+dp2+zero1": "tp=2 sequence_parallel=true dp=2 zero=1",
    "dp2+zero2": "dp=2 zero=2",
    "dp3+zero1": "dp=3 zero=1",  # shards of different sizes
    "dp2+zero3": "dp=2 zero=3",
    "pp2": "pp=2",
}
DEFAULT = {"ema-tp2+sp+dp2+zero1", "schedule_free-dp2+zero3"}
BATCH = ["batch.global_batch_size=12", "batch.micro_batch_size=2"]
OPTIMIZERS = {"ema": EMA, "schedule_free": SCHEDULE_FREE}
CASES = [
    pytest.param(
        OPTIMIZERS[name],
        LAYOUTS[layout],
        id=f"{name}-{layout}",
        marks=[] if f"{name}-{layout}" in DEFAULT else pytest.mark.slow,
    )
    for name in OPTIMIZERS
    for layout in LAYOUTS
]


def train(config: Config):
    """Return the shards that this rank saves, and the losses of weights and average."""
    engine = NativeEngine()
    engine.build(config)
    for batch in checks.batches(config, STEPS):
        checks.run_step(engine, batch)
    shards = {
        (shard.name, shard.offset): shard.tensor.float().numpy().reshape(shard.size).copy()
        for shard in engine.saved_state_shards()
    }
    losses = [checks.losses_after(engine, batch)[0]]
    with engine.averaged_weights():
        losses.append(checks.losses_after(engine, batch)[0])
    losses.append(checks.losses_after(engine, batch)[0])
    engine.close()
    return shards, losses


@pytest.mark.parametrize(("optimizer", "layout"), CASES)
def test_the_average_is_that_of_one_process(
    ranks: Ranks, configure, optimizer: list[str], layout: str
) -> None:
    overrides = (layers(layout), *optimizer, *BATCH)
    config = configure(layout, *overrides)
    found = ranks.run(config.num_processes, train, config)
    tensors = checks.joined([shards for shards, _ in found])
    shards, losses = train(configure("", *overrides))
    expected = checks.joined([shards])
    assert tensors.keys() == expected.keys()
    assert {name.partition("/")[0] for name in tensors} & {"ema", "x"}
    for key, values in expected.items():
        # AdamW divides gradients by their size: rounding errors of small ones are not small in the
        # weights, and the moments are those of gradients at other weights
        is_moment = key.startswith("exp_avg")
        rtol, atol = (5e-5, 0.0) if is_moment else (1e-5, 5e-3 * checks.RATE)
        error = np.abs(tensors[key] - values).max()
        assert error <= rtol * np.abs(values).max() + atol, (key, error)
    for _, of_rank in found:
        assert of_rank == pytest.approx(losses, rel=1e-5)
        assert of_rank[0] == of_rank[2] != of_rank[1]


@pytest.mark.slow  # 9 s each
@pytest.mark.parametrize("recipe", ["bf16_sr", "mixed"])
def test_resume_is_bit_identical_and_other_layouts_load_the_state(
    ranks: Ranks, configure, tmp_path, recipe: str
) -> None:
    overrides = (layers("pp=2"), *SCHEDULE_FREE, f"precision={recipe}")

    def run(layout, check, *arguments):
        config = configure(layout, *overrides)
        if config.num_processes == 1:
            return check(config, *arguments)
        return ranks.run(config.num_processes, check, config, *arguments)[0]

    path = tmp_path / f"step_{STEPS:08}"
    expected = run("tp=2 dp=2 zero=1", checks.save_and_continue, tmp_path, STEPS)
    assert run("tp=2 dp=2 zero=1", checks.load_and_continue, path, STEPS) == expected
    for layout in ("", "pp=2"):
        found = run(layout, checks.load_and_continue, path, STEPS)
        for row, other in zip(found, expected, strict=True):
            assert row == pytest.approx(other, rel=2e-2), layout
