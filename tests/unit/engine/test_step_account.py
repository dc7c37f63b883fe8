"""Each moment of a step counts for one class, on a CPU and on an accelerator."""

import pytest

from hlat.engine.step_account import (
    TIME_CLASSES,
    build_module_table,
    build_operator_table,
    classify,
    compute_account,
    divide_step,
)
from hlat.engine.trace_events import EventContext, TraceEvent, build_step_trace
from tests.unit.engine.test_trace_events import STEP, op, span

CORE = EventContext(module="layers.0.self_attn.core")
MLP = EventContext(module="layers.0.mlp")
OUTSIDE = EventContext()


@pytest.mark.parametrize(
    ("name", "context", "expected"),
    [
        ("aten::mm", MLP, "matmuls"),
        ("aten::addmm_", EventContext("loss"), "matmuls"),
        ("aten::bmm", CORE, "attention"),
        ("aten::bmm", EventContext(module="layers.0.self_attn.core.module"), "attention"),
        ("aten::bmm", EventContext(module="layers.0"), "attention"),
        ("aten::bmm", MLP, "matmuls"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", MLP, "attention"),
        ("hlat::interval_attention", OUTSIDE, "attention"),
        ("aten::silu", MLP, "elementwise"),
        ("aten::add_", EventContext(is_backward=True), "elementwise"),
        ("aten::_softmax", EventContext("loss"), "loss"),
        ("aten::_fused_adamw_", EventContext("optimizer"), "optimizer"),
        ("aten::mm", EventContext("optimizer"), "optimizer"),
        ("aten::bitwise_and_", EventContext("rounding"), "rounding"),
        ("aten::cat", EventContext("gradient_reduction"), "gradient_reduction"),
        ("c10d::allreduce_", EventContext("gradient_reduction"), "gradient_reduction"),
        ("c10d::allreduce_", MLP, "communication"),
        ("c10d::allreduce_", EventContext("optimizer"), "communication"),
        ("aten::copy_", EventContext("communication"), "communication"),
        ("aten::copy_", OUTSIDE, "other"),
        ("MmBackward0", MLP, "python"),
        ("torch::autograd::AccumulateGrad", MLP, "python"),
        ("autograd::engine::evaluate_function: MmBackward0", MLP, "python"),
        ("CompiledFunction", MLP, "python"),
        ("## Call CompiledFxGraph fabc ##", MLP, "elementwise"),
        ("## Call CompiledFxGraph fabc ##", EventContext("rounding"), "rounding"),
        ("## Call CompiledFxGraph fabc ##", EventContext("loss"), "loss"),
    ],
)
def test_classes_of_events(name: str, context: EventContext, expected: str) -> None:
    assert classify(name, False, context) == expected


@pytest.mark.parametrize(
    ("name", "context", "expected"),
    [
        ("hlat::step", OUTSIDE, "python"),
        ("module::layers.0", MLP, "python"),
        ("hlat::optimizer", EventContext("optimizer"), "python"),
        ("TorchDynamo Cache Lookup", MLP, "python"),
        ("hlat::gradient_reduction", EventContext("gradient_reduction"), "gradient_reduction"),
        ("## Call CompiledFxGraph fabc ##", MLP, "elementwise"),
    ],
)
def test_classes_of_ranges(name: str, context: EventContext, expected: str) -> None:
    assert classify(name, True, context) == expected


def build_host_step():
    return build_step_trace(
        [
            span(*STEP),
            span("module::layers.0.mlp", 10, 40),
            op("aten::linear", 12, 32, sequence=1),
            op("aten::mm", 14, 30, sequence=1),
            op("aten::silu", 33, 38, sequence=2),
            op("autograd::engine::evaluate_function: SiluBackward0", 50, 60, sequence=2),
            op("aten::silu_backward", 51, 59),
            span("hlat::gradient_reduction", 60, 90),
            op("c10d::allreduce_", 61, 64),
            op("aten::copy_", 80, 85),
        ]
    )


def test_host_time_is_divided_without_remainder() -> None:
    account = compute_account(divide_step(build_host_step()))
    in_microseconds = {name: round(seconds * 1e6, 6) for name, seconds in account.items()}
    assert in_microseconds == {
        **dict.fromkeys(TIME_CLASSES, 0),
        "matmuls": 20,
        "elementwise": 5 + 8,
        "gradient_reduction": 30,
        "python": 10 + 5 + 10 + 2 + 10,
    }
    assert sum(in_microseconds.values()) == 100


def test_waiting_after_a_collective_has_its_class() -> None:
    trace = build_step_trace(
        [span(*STEP), op("c10d::recv_", 10, 12), op("aten::add", 50, 60), op("aten::mul", 65, 70)]
    )
    slices = divide_step(trace)
    account = compute_account(slices)
    assert account["communication"] == pytest.approx(40e-6)
    assert account["python"] == pytest.approx((10 + 5 + 30) * 1e-6)
    (row,) = [row for row in build_operator_table(slices) if row["operator"] == "c10d::recv_"]
    assert (row["calls"], row["ms"]) == (1, 0.04)


def test_tables_add_up_and_name_modules() -> None:
    slices = divide_step(build_host_step())
    modules = {row["module"]: row for row in build_module_table(slices)}
    assert modules["layers.0.mlp"]["forward_ms"] == 0.03
    assert modules["layers.0.mlp"]["backward_ms"] == 0.01
    assert modules["(gradient_reduction)"]["ms"] == 0.03
    assert sum(row["ms"] for row in modules.values()) == pytest.approx(0.1)
    operators = build_operator_table(slices)
    assert operators[0]["ms"] == max(row["ms"] for row in operators)
    assert sum(row["percent"] for row in operators) == pytest.approx(100)


def kernel(name: str, start: float, end: float, external_id: int | None = None) -> TraceEvent:
    args = {} if external_id is None else {"External id": external_id}
    return TraceEvent(name, "kernel", start, end, "stream", args)


def operator(name: str, start: float, end: float, external_id: int) -> TraceEvent:
    return TraceEvent(name, "cpu_op", start, end, 0, {"External id": external_id})


def build_device_step(*kernels: TraceEvent):
    return build_step_trace(
        [
            span(*STEP),
            span("module::layers.0.mlp", 1, 30),
            operator("aten::mm", 2, 4, 1),
            operator("aten::silu", 5, 6, 2),
            span("hlat::gradient_reduction", 30, 40),
            operator("c10d::allreduce_", 31, 32, 3),
            *kernels,
        ]
    )


def test_device_time_is_that_of_kernels_and_python_is_the_rest() -> None:
    trace = build_device_step(kernel("sgemm", 10, 40, 1), kernel("elementwise", 40, 55, 2))
    slices = divide_step(trace)
    account = compute_account(slices)
    assert account["matmuls"] == pytest.approx(30e-6)
    assert account["elementwise"] == pytest.approx(15e-6)
    assert account["python"] == pytest.approx(55e-6)
    assert sum(account.values()) == pytest.approx(100e-6)
    assert slices[0].operator == "aten::mm"


def test_a_collective_counts_only_where_no_other_kernel_runs() -> None:
    trace = build_device_step(
        kernel("sgemm", 10, 40, 1),
        kernel("ncclDevKernel_AllReduce", 30, 70, 3),
        kernel("elementwise", 50, 60, 2),
        kernel("ncclDevKernel_AllReduce", 65, 80, 3),
    )
    account = compute_account(divide_step(trace))
    assert account["gradient_reduction"] == pytest.approx((10 + 20) * 1e-6)
    assert account["matmuls"] == pytest.approx(30e-6)
    assert account["python"] == pytest.approx(30e-6)
    assert sum(account.values()) == pytest.approx(100e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ampere_sgemm_128x64_tn", "matmuls"),
        ("void pytorch_flash::flash_fwd_kernel", "attention"),
        ("ncclDevKernel_SendRecv", "communication"),
        ("Memcpy HtoD", "other"),
    ],
)
def test_kernels_without_an_operator_are_classified_by_name(name: str, expected: str) -> None:
    account = compute_account(divide_step(build_device_step(kernel(name, 0, 25))))
    assert account[expected] == pytest.approx(25e-6)


def test_kernels_of_a_compiled_graph_are_classified_by_name() -> None:
    graph = TraceEvent(
        "## Call CompiledFxGraph f ##", "user_annotation", 7, 9, 0, {"External id": 9}
    )
    trace = build_device_step(
        graph, kernel("triton_tem_fused_mm_0", 10, 30, 9), kernel("triton_poi_fused_1", 30, 40, 9)
    )
    account = compute_account(divide_step(trace))
    assert account["matmuls"] == pytest.approx(20e-6)
    assert account["elementwise"] == pytest.approx(10e-6)


def test_kernels_that_end_after_the_step_are_cut() -> None:
    account = compute_account(divide_step(build_device_step(kernel("sgemm", 90, 130, 1))))
    assert account["matmuls"] == pytest.approx(10e-6)
    assert sum(account.values()) == pytest.approx(100e-6)
