"""Limits of a step: sizes of its matmuls, and bytes that it moves at least."""

from contextlib import closing

import pytest
import torch

from benchmarks.step import step_limits
from benchmarks.step.step_limits import (
    MatmulTimes,
    Stream,
    count_bytes,
    count_matmuls,
    parse_matmul,
)
from hlat.config.resolve import resolve_config
from hlat.engine.native.native_engine import NativeEngine
from hlat.engine.step_account import TimeSlice
from hlat.engine.trace_events import EventContext


@pytest.mark.parametrize(
    ("operator", "shapes", "size"),
    [
        ("aten::mm", "[8, 4] [4, 2]", (8, 4, 2)),
        ("aten::mm", "[8, 4] [4, 2] [8, 2]", (8, 4, 2)),
        ("aten::addmm_", "[8, 2] [8, 4] [4, 2]", (8, 4, 2)),
        ("aten::addmm", "[2] [8, 4] [4, 2]", (8, 4, 2)),
        ("aten::linear", "[8, 4] [4, 2]", None),
        ("aten::mm", "[8, 4] [8, 2]", None),
        ("aten::mm", "", None),
    ],
)
def test_sizes_are_those_of_the_factors(operator, shapes, size) -> None:
    assert parse_matmul(operator, shapes) == size


def build_slice(operator: str, shapes: str, time_class="matmuls", calls=1) -> TimeSlice:
    return TimeSlice(operator, shapes, time_class, EventContext(), 1.0, calls)


def test_matmuls_are_counted_by_size() -> None:
    slices = [
        build_slice("aten::mm", "[8, 4] [4, 2]"),
        build_slice("aten::addmm_", "[8, 2] [8, 4] [4, 2]"),
        build_slice("aten::mm", "[4, 4] [4, 4]"),
        build_slice("aten::mm", "[5, 5] [5, 5]", "attention"),
        build_slice("aten::linear", "[8, 4] [4, 2]"),
    ]
    assert count_matmuls(slices) == {(8, 4, 2): 2, (4, 4, 4): 1}


def test_the_limit_is_the_sum_over_all_matmuls() -> None:
    counts = {(64, 32, 16): 3, (8, 8, 8): 2}
    times = MatmulTimes(torch.float32, "cpu", counts)
    limit = times.compute_limit(counts)
    assert limit == 3 * times.seconds[64, 32, 16] + 2 * times.seconds[8, 8, 8] > 0
    assert times.fastest[64, 32, 16]().shape == (64, 16)
    assert times.compute_rate(counts) == (2 * 64 * 32 * 16 * 3 + 2 * 512 * 2) / limit


def test_a_stream_writes_a_third_of_its_bytes(monkeypatch) -> None:
    monkeypatch.setattr(step_limits, "_STREAM_BYTES", 1 << 12)
    stream = Stream("cpu")
    for array in stream.arrays:
        array.fill_(2)
    stream.move(12 * 100)
    result = stream.arrays[0]
    assert result[:100].eq(3).all()
    assert result[100:].eq(2).all()


@pytest.mark.parametrize(
    ("precision", "optimizer", "rounding"),
    # gradients twice, then weights, two moments and their step, read and written
    [("fp32", 2 * 4 + 2 * 12, 0), ("bf16", 2 * 2 + 2 * 6, 0), ("mixed", 2 * 4 + 2 * 12, 4 + 2)],
)
def test_bytes_of_the_update_follow_from_the_recipe(
    compose, small, precision, optimizer, rounding
) -> None:
    config = resolve_config(compose(*small, f"precision={precision}", "hardware=cpu"))
    with closing(NativeEngine()) as engine:
        engine.build(config)
        size = sum(param.numel() for param in engine.params.model_params.values())
        num_params = len(engine.params.model_params)
        found = count_bytes(engine, config)
    steps = 2 * 4 * num_params  # fp32 scalars
    assert found["optimizer"] == optimizer * size + steps
    assert found["rounding"] == rounding * size
    width = 4 if precision == "fp32" else 2
    assert found["loss"] == 2 * 8 * 64 * config.model.vocab_size * width
    assert found["elementwise"] > 0
