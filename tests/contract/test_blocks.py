"""Activation checkpointing and compilation change memory and speed, but no result."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch

from hlat.config.config_errors import ConfigError
from hlat.config.parallelism import ActivationCheckpointing
from hlat.config.resolve import resolve_config
from hlat.data.packed_sequences import PackedSequences
from hlat.engine.engine_factory import create_engine

RATE = 1e-3
MODES = list(ActivationCheckpointing)


@pytest.fixture
def build(compose, small):
    def make(*overrides):
        config = resolve_config(compose(*small, "model.vocab_size=512", *overrides))
        engine = create_engine(config)
        engine.build(config)
        return engine

    return make


@pytest.fixture
def batches():
    generator = np.random.default_rng(0)
    return [PackedSequences(generator.integers(0, 512, (8, 64), np.int32)) for _ in range(3)]


def train(engine, batches):
    return [engine.read_metrics(engine.train_step(batch, RATE)) for batch in batches]


def checkpointing(mode):
    return f"parallelism.activation_checkpointing={mode.value}"


@pytest.mark.parametrize("recipe", ["fp32", "mixed"])
@pytest.mark.slow_after(1)
def test_activation_checkpointing_is_bit_identical(build, batches, recipe):
    metrics = [train(build(f"precision={recipe}", checkpointing(mode)), batches) for mode in MODES]
    assert metrics[0] == metrics[1] == metrics[2]


def measure_saved_bytes(engine, batch):
    """Return the bytes of the tensors that autograd saves for the backward pass, without weights."""
    weights = {weight.untyped_storage().data_ptr() for weight in engine.model_parts[0].parameters()}
    saved = {}

    def save(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        engine._runner.forward(engine._build_batch(batch), 1.0)
    return sum(saved.values())


def test_activation_checkpointing_saves_memory(build, batches):
    none, selective, full = (
        measure_saved_bytes(build(checkpointing(mode), "batch.micro_batch_size=8"), batches[0])
        for mode in MODES
    )
    assert full < 0.5 * selective < 0.5 * none


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # several warnings of torch
@pytest.mark.parametrize(
    ("recipe", "tolerance"),
    [
        ("fp32", 1e-5),
        ("mixed", 1e-2),
        ("bf16_sr", 2e-2),
    ],
)
def test_compiled_and_eager_agree(build, batches, recipe, tolerance):
    groups = (f"precision={recipe}", checkpointing(MODES[1]))
    plain, compiled = (
        train(build(f"compiler={name}", *groups), batches) for name in ("none", "inductor")
    )
    for one, other in zip(plain, compiled, strict=True):
        assert dataclasses.astuple(one) == pytest.approx(dataclasses.astuple(other), rel=tolerance)


@pytest.mark.slow
def test_a_missing_compiler_is_reported_before_the_first_step(build, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("CXX", "my-c++")
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler, and there is no my-c\+\+"):
        build("compiler=inductor")
