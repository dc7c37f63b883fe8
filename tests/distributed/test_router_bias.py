"""Buffers of routers in every layout, checkpoint and skipped step are those of one process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hlat.checkpoint import checkpoint_store
from hlat.config.run import Config
from hlat.engine.native.native_engine import NativeEngine
from tests.distributed import checks
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("processes")]

RATE = 0.001
MOE = [
    *("model.mlp.kind=moe", "model.mlp.moe.num_experts=8", "batch.micro_batch_size=2"),
    f"model.mlp.moe.bias_update_rate={RATE}",
]
BUFFERS = [
    *(*MOE, "model.num_layers=3", "model.mlp.moe.balance_loss=0.5"),
    *("model.mlp.moe.balance_scope=previous_step", "model.mlp.moe.capacity_factor=0.9"),
]
LAYOUTS = {
    "recomputed": "activation_checkpointing=full",
    "dp2": "dp=2",
    "tp2+sp": "tp=2 sequence_parallel=true",
    "pp2": "pp=2",
    "dp2+zero3": "dp=2 zero=3",
    "tp2+pp2+dp2+zero1": "tp=2 pp=2 dp=2 zero=1",
}
SLOW = {"tp2+pp2+dp2+zero1", "tp2+sp", "pp2"}
STEPS = 4


def read_biases(engine: NativeEngine) -> dict[str, list[float]]:
    """Return the buffers of this rank by name."""
    return {
        shard.name: shard.tensor.tolist()
        for shard in engine.state_shards()
        if shard.name.startswith("buffers/")
    }


def train_biases(config: Config, steps: int = STEPS) -> list[Any]:
    """Return the loss and the biases of this rank after each step."""
    engine = NativeEngine()
    engine.build(config)
    rows: list[Any] = []
    for batch in checks.batches(config, steps):
        loss, *_ = checks.run_step(engine, batch)
        rows.append((loss, read_biases(engine)))
    assert engine.find_replica_mismatches() == []
    engine.close()
    return rows


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in LAYOUTS],
)
def test_buffers_equal_one_process(ranks: Ranks, configure, layout: str) -> None:
    expected = train_biases(configure("", *BUFFERS))
    config = configure(LAYOUTS[layout], *BUFFERS)
    found = ranks.run(config.num_processes, train_biases, config)
    for step, (loss, biases) in enumerate(expected):
        merged: dict[str, list[float]] = {}
        for rank in found:
            assert rank[step][0] == pytest.approx(loss, rel=1e-5)
            for name, values in rank[step][1].items():
                assert merged.setdefault(name, values) == values
        assert merged == biases
    assert np.array([*expected[-1][1].values()]).shape == (6, 8)


def test_biases_follow_the_selections_of_all_micro_batches(configure) -> None:
    engine, config = NativeEngine(), configure("", *MOE)
    engine.build(config)
    selected: dict[int, list[int]] = {0: [], 1: []}
    for layer, block in engine.model_parts[0].layers.items():
        block.mlp.gate.register_forward_hook(
            lambda gate, x, output, layer=int(layer): selected[layer].extend(output[1].flatten())
        )
    expected = np.zeros((2, 8), np.float32)
    for batch in checks.batches(config, 3):
        checks.run_step(engine, batch)
        for layer, experts in selected.items():
            counts = np.bincount(experts, minlength=8)
            assert counts.sum() == 16 * 32 * 2
            expected[layer] += np.float32(RATE) * np.sign(counts.mean() - counts)
            experts.clear()
    assert np.array_equal([*read_biases(engine).values()], expected)
    assert np.abs(expected).max() > RATE
    engine.close()


def save_biases(config: Config, folder: Path) -> tuple[list[Any], dict[str, list[float]]]:
    """Save after two steps, and return the metrics of two further steps, and the last biases."""
    engine = NativeEngine()
    engine.build(config)
    first, second, *others = checks.batches(config, 4)
    for batch in (first, second):
        checks.run_step(engine, batch)
    group = engine.parallel_state.world_group
    checkpoint_store.save_checkpoint(folder, 2, engine.saved_state_shards(), {"step": 2}, group)
    rows = [checks.run_step(engine, batch) for batch in others]
    biases = read_biases(engine)
    engine.close()
    return rows, biases


def resume_biases(config: Config, path: Path) -> tuple[list[Any], dict[str, list[float]]]:
    """Continue the checkpoint of `save_biases`."""
    engine = NativeEngine()
    engine.build(config, initialize=False)
    checkpoint_store.load_checkpoint(path, engine.state_shards())
    rows = [checks.run_step(engine, batch) for batch in checks.batches(config, 4)[2:]]
    biases = read_biases(engine)
    engine.close()
    return rows, biases


def test_resume_is_bit_identical_and_works_in_other_layouts(
    ranks: Ranks, configure, tmp_path
) -> None:
    layout = configure("dp=2 pp=2", *MOE)
    saved = ranks.run(4, save_biases, layout, tmp_path)
    path = tmp_path / "step_00000002"
    names = [name for name in checkpoint_store.load_manifest(path).tensors if "buffers/" in name]
    assert len(names) == layout.model.num_layers
    assert ranks.run(4, resume_biases, layout, path) == saved
    rows, biases = resume_biases(configure("", *MOE, f"model.num_layers={len(names)}"), path)
    assert biases == {name: values for _, found in saved for name, values in found.items()}
    for row, other in zip(rows, saved[0][0], strict=True):
        assert row == pytest.approx(other, rel=1e-5)


def test_a_skipped_step_changes_no_bias(configure) -> None:
    engine, config = NativeEngine(), configure("", *MOE)
    engine.build(config)
    first, second = checks.batches(config, 2)
    checks.run_step(engine, first)
    biases = read_biases(engine)
    assert any(map(any, biases.values()))
    with torch.no_grad():
        next(s for s in engine.state_shards() if s.name.startswith("weights/")).tensor.fill_(np.nan)
    assert checks.run_step(engine, second)[-1] == 1
    assert read_biases(engine) == biases
    engine.init_weights()
    assert not any(map(any, read_biases(engine).values()))
    engine.close()


@pytest.mark.parametrize("recipe", ["bf16", "mixed"])
def test_biases_are_fp32_in_every_recipe(configure, recipe: str) -> None:
    engine, config = NativeEngine(), configure("", *MOE, f"precision={recipe}")
    engine.build(config)
    checks.run_step(engine, checks.batches(config, 1)[0])
    buffers = [s.tensor for s in engine.state_shards() if s.name.startswith("buffers/")]
    assert {tensor.dtype for tensor in buffers} == {torch.float32}
    assert {abs(value) for value in buffers[0].tolist()} <= {0.0, float(np.float32(RATE))}
    assert not {"weights", "exp_avg"} & {
        s.name.partition("/")[0] for s in engine.state_shards() if "correction_bias" in s.name
    }
    engine.close()
