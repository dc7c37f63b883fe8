"""A recorded step computes the same, and its account adds up to its duration."""

import gzip
import json
from contextlib import closing

import numpy as np
import pytest
import torch

from hlat.config.resolve import resolve_config
from hlat.data.packed_sequences import PackedSequences
from hlat.engine.native.native_engine import NativeEngine
from hlat.engine.step_account import build_module_table, compute_account, divide_step
from hlat.engine.trace_events import StepTrace, load_trace
from hlat.precision import record_range

SMALL = (
    *("model=tiny", "model.num_layers=2", "model.hidden_size=32", "model.intermediate_size=64"),
    *("model.vocab_size=128", "model.num_attention_heads=4", "model.num_key_value_heads=2"),
    *("batch.sequence_length=32", "batch.global_batch_size=4", "batch.micro_batch_size=2"),
    *("hardware=cpu", "parallelism=single", "engine.device=cpu", "profiler.steps=[3]"),
)
TOLERANCE = 1e-6
"""Largest relative difference between the duration of a step and the sum of its classes."""


def build_sequences(engine: NativeEngine, step: int) -> PackedSequences:
    batch = engine.config.batch
    size = (batch.global_batch_size, batch.sequence_length)
    return PackedSequences(np.random.default_rng(step).integers(0, 128, size, np.int32))


def train(compose, tmp_path, *overrides: str, recorded: tuple[int, ...] = ()):
    """Train five steps; return losses and norms, and the traces of the recorded steps."""
    config = resolve_config(compose(*SMALL, *overrides))
    rows, traces = [], []
    with closing(NativeEngine()) as engine:
        engine.build(config)
        for step in range(5):
            sequences = build_sequences(engine, step)
            recording = engine.start_recording() if step in recorded else None
            pending = engine.train_step(sequences, 1e-2)
            if recording is not None:
                recording.stop(tmp_path / "memory.pickle")
                recording.write_trace(tmp_path / "trace.json.gz")
                traces.append(load_trace(tmp_path / "trace.json.gz"))
            rows.append(engine.read_metrics(pending).scalars)
    return rows, traces


def compute_classes(trace: StepTrace) -> dict[str, float]:
    slices = divide_step(trace)
    account = compute_account(slices)
    duration = (trace.step.end - trace.step.start) / 1e6
    assert min(one.seconds for one in slices) > -TOLERANCE * duration
    assert sum(account.values()) == pytest.approx(duration, rel=TOLERANCE)
    return account


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("precision=bf16_sr_master",),
        ("precision=bf16_sr", "parallelism.activation_checkpointing=full"),
        ("precision=mixed", "parallelism.activation_checkpointing=selective"),
    ],
    ids=" ".join,
)
def test_a_recorded_step_computes_the_same_and_is_accounted(compose, tmp_path, overrides) -> None:
    plain, _ = train(compose, tmp_path, *overrides)
    rows, (first, second) = train(compose, tmp_path, *overrides, recorded=(2, 4))
    assert rows == plain
    for trace in (first, second):
        account = compute_classes(trace)
        used = {"matmuls", "attention", "elementwise", "loss", "optimizer", "other", "python"}
        assert all(account[name] > 0 for name in used), account
        assert (account["rounding"] > 0) is bool(overrides)  # all but fp32
        assert account["communication"] == 0


def test_modules_have_the_time_of_both_passes(compose, tmp_path) -> None:
    _, (trace,) = train(compose, tmp_path, recorded=(3,))
    rows = {row["module"]: row for row in build_module_table(divide_step(trace))}
    names = ("layers.1.mlp.down_proj", "layers.0.self_attn.core", "norm", "embed_tokens")
    for name in names:
        assert rows[name]["forward_ms"] > 0, name
        assert rows[name]["backward_ms"] > 0, name
    assert rows["(loss)"]["ms"] > 0
    assert rows["(optimizer)"]["ms"] > 0


def test_matmuls_have_their_shapes(compose, tmp_path) -> None:
    _, (trace,) = train(compose, tmp_path, recorded=(3,))
    slices = [one for one in divide_step(trace) if one.time_class == "matmuls"]
    shapes = [one.shapes for one in slices]
    # down_proj of a micro batch: 2 sequences of 32 tokens, 64 to 32 features, in 2 layers
    assert shapes.count("[64, 64] [64, 32]") >= 2 * 2


def test_nothing_is_left_behind(compose, tmp_path) -> None:
    config = resolve_config(compose(*SMALL))
    with closing(NativeEngine()) as engine:
        engine.build(config)
        before = [len(module._forward_hooks) for module in engine.model_parts[0].modules()]
        recording = engine.start_recording()
        assert record_range._is_recording
        recording.stop(tmp_path / "memory.pickle")
        assert not record_range._is_recording
        modules = [*engine.model_parts[0].modules()]
        assert [len(module._forward_hooks) for module in modules] == before
        assert not any(module._forward_pre_hooks for module in modules)
        recording.write_trace(tmp_path / "trace.json.gz")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json.gz"]  # a CPU has no snapshot
    content = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    assert content["traceEvents"]


def test_a_profiler_that_cannot_start_leaves_nothing_behind(compose, monkeypatch) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("cannot start")

    monkeypatch.setattr(torch.profiler.profile, "start", fail)
    with closing(NativeEngine()) as engine:
        engine.build(resolve_config(compose(*SMALL)))
        with pytest.raises(RuntimeError, match="cannot start"):
            engine.start_recording()
        assert not record_range._is_recording
        assert not any(module._forward_pre_hooks for module in engine.model_parts[0].modules())


def test_stacks_and_allocations_are_in_the_trace(compose, tmp_path) -> None:
    overrides = ("profiler.with_stack=true", "profiler.memory=true")
    _, (trace,) = train(compose, tmp_path, *overrides, recorded=(3,))
    compute_classes(trace)
    rows = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    assert any(row["name"] == "[memory]" for row in rows)
    assert any(
        row.get("cat") == "python_function" and "native_engine.py" in row["name"] for row in rows
    )


@pytest.mark.slow  # imports the compiler
@pytest.mark.filterwarnings("ignore")  # of torch
@pytest.mark.parametrize("precision", ["fp32", "bf16_sr"])
def test_a_compiled_step_computes_the_same_and_is_accounted(compose, tmp_path, precision) -> None:
    overrides = ("compiler=inductor", f"precision={precision}")
    plain, _ = train(compose, tmp_path, *overrides)
    rows, (trace,) = train(compose, tmp_path, *overrides, recorded=(3,))
    assert rows == plain
    account = compute_classes(trace)
    used = {"matmuls", "attention", "elementwise", "loss", "optimizer", "python"}
    assert all(account[name] > 0 for name in used), account
    modules = [row["module"] for row in build_module_table(divide_step(trace))]
    assert {"layers.0", "layers.1"} <= {*modules}
    assert not any(name.startswith("layers.0.") for name in modules)
