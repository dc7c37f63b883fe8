"""What is recomputed and what is compiled changes memory and speed, not the numbers."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch

from hlat.config.errors import ConfigError
from hlat.config.parallelism import ActivationCheckpointing
from hlat.config.resolve import resolve
from hlat.data.sequences import Sequences
from hlat.engine.create import create_engine

RATE = 1e-3
MODES = list(ActivationCheckpointing)


@pytest.fixture
def build(compose, small):
    def make(*overrides):
        config = resolve(compose(*small, *overrides))
        engine = create_engine(config)
        engine.build(config)
        return engine

    return make


@pytest.fixture
def batches():
    generator = np.random.default_rng(0)
    return [Sequences(generator.integers(0, 4096, (8, 64), np.int32)) for _ in range(3)]


def train(engine, batches):
    return [engine.read(engine.train_step(batch, RATE)) for batch in batches]


def checkpointing(mode):
    return f"parallelism.activation_checkpointing={mode.value}"


@pytest.mark.parametrize("recipe", ["fp32", "mixed"])
def test_what_is_computed_again_is_the_same_to_the_last_bit(build, batches, recipe):
    numbers = [train(build(f"precision={recipe}", checkpointing(mode)), batches) for mode in MODES]
    assert numbers[0] == numbers[1] == numbers[2]


def kept_bytes(engine, batch):
    """Bytes of distinct tensors that autograd keeps for the backward pass, weights aside."""
    weights = {weight.untyped_storage().data_ptr() for weight in engine.parts[0].parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine._passage.forward(engine._batch(batch), 1.0)
    return sum(kept.values())


def test_less_is_kept(build, batches):
    none, selective, full = (
        kept_bytes(build(checkpointing(mode), "batch.micro_batch_size=8"), batches[0])
        for mode in MODES
    )
    assert full < 0.5 * selective < 0.5 * none


@pytest.mark.filterwarnings("ignore")  # torch's own, several
@pytest.mark.parametrize(
    ("recipe", "tolerance"),
    [("fp32", 1e-5), pytest.param("mixed", 1e-2, marks=pytest.mark.slow), ("bf16_sr", 2e-2)],
)
def test_a_compiled_model_gives_the_same_numbers(build, batches, recipe, tolerance):
    groups = (f"precision={recipe}", checkpointing(MODES[1]))
    plain, compiled = (
        train(build(f"compiler={name}", *groups), batches) for name in ("none", "inductor")
    )
    for one, other in zip(plain, compiled, strict=True):
        assert dataclasses.astuple(one) == pytest.approx(dataclasses.astuple(other), rel=tolerance)


def test_a_machine_without_a_compiler_says_so_before_the_first_step(build, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("CXX", "my-c++")
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler, and there is no my-c\+\+"):
        build("compiler=inductor")
