"""Events of a trace are nested, and operators of a backward pass belong to their forward pass."""

import gzip
import json

import pytest

from hlat.engine.trace_events import EventContext, TraceEvent, build_step_trace, load_trace


def op(name: str, start: float, end: float, sequence: int | None = None, thread=0) -> TraceEvent:
    args = {} if sequence is None else {"Sequence number": sequence}
    return TraceEvent(name, "cpu_op", start, end, thread, args)


def span(name: str, start: float, end: float) -> TraceEvent:
    return TraceEvent(name, "user_annotation", start, end)


STEP = ("hlat::step", 0, 100)


def find(trace, name: str) -> TraceEvent:
    pending = [trace.step]
    while pending:
        event = pending.pop()
        if event.name == name:
            return event
        pending += event.children
    raise AssertionError(name)


def test_events_are_nested_by_time_and_thread() -> None:
    events = [
        span(*STEP),
        op("aten::linear", 10, 40),
        op("aten::mm", 15, 30),
        op("gloo:all_reduce", 12, 90, thread=1),
        op("aten::add", 40, 50),
        op("aten::later", 100, 120),
    ]
    step = build_step_trace(events[::-1]).step
    assert [child.name for child in step.children] == ["aten::linear", "aten::add"]
    assert [child.name for child in step.children[0].children] == ["aten::mm"]


def test_an_event_that_ends_after_its_parent_by_rounding_is_cut() -> None:
    step = build_step_trace([span(*STEP), op("aten::a", 5, 10), op("aten::b", 6, 10.001)]).step
    assert find(build_step_trace([span(*STEP)]), "hlat::step").children == []
    assert step.children[0].children[0].end == 10


def test_contexts_are_those_of_the_innermost_ranges() -> None:
    trace = build_step_trace(
        [
            span(*STEP),
            span("module::layers.0", 1, 20),
            span("module::layers.0.mlp", 2, 10),
            op("aten::mm", 3, 9),
            op("aten::add", 11, 12),
            span("hlat::optimizer", 30, 60),
            span("hlat::rounding", 40, 50),
            op("aten::bitwise_and_", 41, 42),
            op("aten::_fused_adamw_", 51, 52),
            span("FSDP::post_backward_reduce (layers.0)", 70, 75),
            op("aten::cat", 71, 72),
            span("FSDP::pre_forward", 80, 85),
            op("aten::split", 81, 82),
        ]
    )
    contexts = {
        "aten::mm": EventContext(module="layers.0.mlp"),
        "aten::add": EventContext(module="layers.0"),
        "aten::bitwise_and_": EventContext("rounding"),
        "aten::_fused_adamw_": EventContext("optimizer"),
        "aten::cat": EventContext("gradient_reduction"),
        "aten::split": EventContext("communication"),
    }
    assert {name: find(trace, name).context for name in contexts} == contexts


def test_backward_operators_have_the_context_of_their_forward_pass() -> None:
    trace = build_step_trace(
        [
            span(*STEP),
            span("module::layers.0.mlp", 1, 10),
            op("aten::mm", 2, 9, sequence=7),
            span("hlat::loss", 11, 20),
            op("_LinearCrossEntropy", 12, 19, sequence=8),
            op("autograd::engine::evaluate_function: _LinearCrossEntropyBackward", 30, 40, 8),
            op("aten::mul_", 31, 32),
            op("autograd::engine::evaluate_function: MmBackward0", 40, 60, sequence=7),
            op("MmBackward0", 41, 59, sequence=7),
            op("aten::t", 42, 43),
            op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 60, 80),
            span("hlat::rounding", 61, 70),
            op("aten::copy_", 62, 63),
        ]
    )
    assert find(trace, "aten::mul_").context == EventContext("loss", "", is_backward=True)
    assert find(trace, "aten::t").context == EventContext("", "layers.0.mlp", is_backward=True)
    assert find(trace, "aten::copy_").context == EventContext("rounding", "", is_backward=True)


def test_shapes_are_those_of_the_tensors() -> None:
    dims = {"Input Dims": [[8, 4], [], [4, 2], [[2], [3]]]}
    assert TraceEvent("aten::mm", "cpu_op", 0, 1, args=dims).shapes == "[8, 4] [4, 2] [[2], [3]]"
    assert TraceEvent("aten::mm", "cpu_op", 0, 1).shapes == ""


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_trace_is_read_from_its_file(tmp_path, suffix: str) -> None:
    rows = [
        {"ph": "X", "cat": "user_annotation", "name": "hlat::step", "ts": 5.0, "dur": 50.0},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 6.0, "dur": 2.0},
        {"ph": "X", "cat": "kernel", "name": "sgemm", "ts": 8.0, "dur": 2.0, "tid": 7},
        {"ph": "M", "name": "process_name"},
        {"ph": "X", "cat": "python_function", "name": "train.py(3): f", "ts": 6.0, "dur": 1.0},
    ]
    content = json.dumps({"traceEvents": rows}).encode()
    path = tmp_path / f"trace{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    trace = load_trace(path)
    assert (trace.step.start, trace.step.end) == (5.0, 55.0)
    assert [child.name for child in trace.step.children] == ["aten::mm"]
    assert [event.name for event in trace.device_events] == ["sgemm"]


def test_a_trace_without_a_step_is_an_error() -> None:
    with pytest.raises(ValueError, match="no range hlat::step"):
        build_step_trace([op("aten::mm", 0, 1)])
