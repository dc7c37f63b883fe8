"""A step does not synchronize, copies from pinned memory, and needs the planned memory."""

import numpy as np
import pytest
import torch

from hlat.config.resolve import resolve_config
from hlat.data.packed_sequences import PackedSequences
from hlat.engine.native import device as native_device
from hlat.engine.native.native_engine import NativeEngine
from hlat.plan.memory_estimate import estimate_memory
from tests.cuda.device_state import forbid_synchronization, measure_peak_bytes
from tests.distributed import checks

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("default")]

WARM_UP_STEPS = 2
CASES = {
    "fp32": [],
    "mixed": ["precision=mixed"],
    "bf16_sr": ["precision=bf16_sr"],
    "bf16_sr_master": ["precision=bf16_sr_master"],
    "document masks": ["data.document_mask=true", "data.loss_mask=true"],
    "compiled": ["precision=bf16_sr", "compiler=inductor"],
    "not deterministic": ["precision=bf16", "engine.deterministic=false"],
}
MEMORY = {
    "cuda": [
        "model=160m",
        "batch.sequence_length=2048",
        "batch.global_batch_size=8",
        "batch.micro_batch_size=4",
    ],
    "cpu": [*checks.MODEL, "batch.micro_batch_size=4"],
}
"""Shape of the comparison with the plan: large enough for the planned tensors to dominate."""


@pytest.mark.parametrize("case", CASES)
def test_steps_do_not_synchronize(configure, device, case) -> None:
    """Allow the host to wait for the device in `read_metrics` only."""
    engine = NativeEngine()
    engine.build(configure(device, *CASES[case]))
    batches = [checks.shard_batch(batch, engine) for batch in checks.batches(engine.config, 5)]
    for batch in batches[:WARM_UP_STEPS]:
        engine.read_metrics(engine.train_step(batch, checks.RATE))
    with forbid_synchronization(device):
        for batch in batches[WARM_UP_STEPS:]:
            metrics = engine.train_step(batch, checks.RATE)
    assert np.isfinite(engine.read_metrics(metrics).loss)
    engine.close()


def test_batches_are_copied_from_pinned_memory(device, monkeypatch) -> None:
    sources = []
    copy = torch.Tensor.to

    def record(tensor, *args, **kwargs):
        sources.append((tensor.is_pinned() if device == "cuda" else None, kwargs["non_blocking"]))
        return copy(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", record)
    tokens = np.arange(12, dtype=np.int32).reshape(3, 4)
    found = native_device.copy_to_device(tokens, torch.device(device))
    assert sources == [(True if device == "cuda" else None, True)]
    assert found.device.type == device
    assert found.tolist() == tokens.tolist()


@pytest.mark.parametrize("recipe", ["fp32", "mixed", "bf16_sr"])
def test_peak_memory_is_planned(compose, device, recipe) -> None:
    overrides = [*MEMORY[device], f"precision={recipe}", "hardware=h200", "parallelism=single"]
    config = resolve_config(compose(*overrides, f"engine.device={device}"))
    batch = config.batch
    shape = (batch.global_batch_size, batch.sequence_length)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape, np.int32)
    engine = NativeEngine()

    def train() -> None:
        engine.build(config)
        for _ in range(2):
            engine.read_metrics(engine.train_step(PackedSequences(tokens), checks.RATE))

    found, planned = measure_peak_bytes(device, train), estimate_memory(config)
    engine.close()
    assert planned.total > 0
    if found is None:
        pytest.skip("a CPU does not count the bytes of tensors")
    assert found == pytest.approx(planned.total, rel=0.1), planned
