"""Account of a step: its duration divided into classes of work, without remainder.

On a CPU, each moment of the step counts for the innermost event of its thread. On an accelerator,
each moment counts for the kernel that runs, a computation before a collective, and the time without
a kernel for Python. The classes therefore add up to the duration of the step.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from hlat.engine.trace_events import EventContext, StepTrace, TraceEvent, clip

TIME_CLASSES = {
    "matmuls": ("Matmuls", "matrix multiplications of projections, MLPs and the output head"),
    "attention": ("Attention", "scores, softmax and weighted values, without projections"),
    "elementwise": (
        "Norms and elementwise",
        "other operators of the model: norms, activations, rotary embeddings, residual connections,"
        " embedding, copies, sums over micro batches",
    ),
    "loss": ("Loss", "softmax and cross entropy, without matmuls"),
    "optimizer": ("Optimizer", "update, gradient norm and clipping"),
    "rounding": ("Rounding", "random bits, stochastic rounding, copies of master weights"),
    "gradient_reduction": (
        "Gradient reduction",
        "sum of gradients over ranks: copies, collectives, and waiting for them",
    ),
    "communication": (
        "Other communication",
        "collectives of tensor and pipeline parallelism, gathering of parameters, and waiting for"
        " them",
    ),
    "other": ("Other", "operators outside of the above, such as the copy of the batch"),
    "python": ("Python", "time in no operator: Python, autograd and torch.compile's wrappers"),
}
"""Label and meaning by class, in the order of figures and tables."""
_COLLECTIVE = re.compile(r"c10d::|gloo:|nccl|record_param_comms|_c10d_functional::", re.IGNORECASE)
_MATMUL = re.compile(
    r"aten::(mm|addmm|bmm|baddbmm|matmul|linear|_?scaled_mm|_?grouped_mm|_int_mm|mv|addmv|dot)_?$"
    r"|mkldnn::_linear|gemm|triton_tem_.*mm|cutlass|cublas",
    re.IGNORECASE,
)
_ATTENTION = re.compile(r"scaled_dot_product|flash|fmha|flex_attention|interval_attention")
_COMPILED_GRAPH = "## Call CompiledFxGraph"
_OPERATOR = re.compile(r"(?!autograd::|torch::autograd::)\w+::")
"""Start of the names of operators; autograd's nodes call Python, or operators."""
_CORE_ATTENTION = re.compile(r"(^|\.)core(\.|$)")
"""Module of the attention without projections, see hlat.model.attention."""
_COMPILED_LAYER = re.compile(r"(^|\.)layers\.\d+$")
"""Module of all operators of a compiled layer."""
_WAITING_CLASSES = ("gradient_reduction", "communication")


@dataclass(frozen=True)
class TimeSlice:
    """Time of one event without that of the events within it.

    Attributes:
        operator: Name of the operator or range.
        shapes: Shapes of its inputs.
        time_class: Key of TIME_CLASSES.
        context: Ranges around the event.
        seconds: Duration.
        num_calls: 1, or 0 for time after the operator in which a rank waits for it.
    """

    operator: str
    shapes: str
    time_class: str
    context: EventContext
    seconds: float
    num_calls: int = 1


def classify(name: str, is_range: bool, context: EventContext) -> str:
    """Return the class of the time of an event without that of the events within it."""
    if _COLLECTIVE.search(name):
        is_gradient = context.range == "gradient_reduction"
        return "gradient_reduction" if is_gradient else "communication"
    if context.range in _WAITING_CLASSES:
        return context.range
    is_graph = name.startswith(_COMPILED_GRAPH)
    if not is_graph and (is_range or not _OPERATOR.match(name)):
        return "python"
    if context.range in ("rounding", "optimizer"):
        return context.range
    if _ATTENTION.search(name) or _CORE_ATTENTION.search(context.module):
        return "attention"
    if name == "aten::bmm" and _COMPILED_LAYER.search(context.module):
        return "attention"  # of hlat.model.block_attention; other matmuls are not batched
    if _MATMUL.search(name):
        return "matmuls"
    if context.range == "loss":
        return "loss"
    return "elementwise" if context.module or context.is_backward else "other"


def divide_step(trace: StepTrace) -> list[TimeSlice]:
    """Divide the time of a step into slices, which add up to its duration."""
    events = [event for event in trace.device_events if event.start < trace.step.end]
    return [*(_divide_device_time(trace, events) if events else _divide_host_time(trace.step))]


def compute_account(slices: list[TimeSlice]) -> dict[str, float]:
    """Return the seconds of each class, for all of TIME_CLASSES."""
    account = dict.fromkeys(TIME_CLASSES, 0.0)
    for one in slices:
        account[one.time_class] += one.seconds
    return account


def build_operator_table(slices: list[TimeSlice]) -> list[dict[str, Any]]:
    """Return class, operator, shapes, calls and milliseconds, the longest time first."""
    groups: dict[tuple[str, ...], list[TimeSlice]] = defaultdict(list)
    for one in slices:
        groups[one.time_class, one.operator, one.shapes].append(one)
    total = sum(one.seconds for one in slices)
    rows = [
        {
            "class": time_class,
            "operator": operator,
            "shapes": shapes,
            "calls": sum(one.num_calls for one in group),
            **_format_time(group, total),
        }
        for (time_class, operator, shapes), group in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["ms"])


def build_module_table(slices: list[TimeSlice]) -> list[dict[str, Any]]:
    """Return the milliseconds of each module without inner modules, the longest time first.

    Work outside of modules is listed by its range, such as (loss).
    """
    groups: dict[str, list[TimeSlice]] = defaultdict(list)
    for one in slices:
        outside = f"({one.context.range or 'outside of modules'})"
        groups[one.context.module or outside].append(one)
    total = sum(one.seconds for one in slices)
    rows = []
    for module, group in groups.items():
        backward = 1e3 * sum(one.seconds for one in group if one.context.is_backward)
        times = _format_time(group, total)
        split = {"forward_ms": round(times["ms"] - backward, 4), "backward_ms": round(backward, 4)}
        rows.append({"module": module, **split, **times})
    return sorted(rows, key=lambda row: -row["ms"])


def _format_time(slices: list[TimeSlice], total: float) -> dict[str, float]:
    seconds = sum(one.seconds for one in slices)
    return {"ms": round(1e3 * seconds, 4), "percent": round(100 * seconds / (total or 1), 3)}


def _divide_host_time(step: TraceEvent) -> Iterator[TimeSlice]:
    """Yield the time of the step and all events within it, each without its children.

    A collective may return before it is complete. The time between it and the next operator, in
    which the rank waits, has its class.
    """
    pending = [step]
    while pending:
        event = pending.pop()
        own_class = classify(event.name, event.is_range, event.context)
        own, cursor, waiting = 0.0, event.start, None
        for child in [*event.children, None]:
            gap = (event.end if child is None else child.start) - cursor
            if waiting is None:
                own += gap
            else:
                name, time_class = waiting.name, classify(waiting.name, False, waiting.context)
                yield TimeSlice(name, "", time_class, waiting.context, gap / 1e6, num_calls=0)
            if child is not None:
                cursor = child.end
                waiting = child if _COLLECTIVE.match(child.name) else None
        yield TimeSlice(event.name, event.shapes, own_class, event.context, own / 1e6)
        pending.extend(event.children)


def _divide_device_time(trace: StepTrace, events: list[TraceEvent]) -> Iterator[TimeSlice]:
    """Yield the time of device events, of which collectives count only where no other one runs."""
    described = [(event, *_classify_device_event(trace, event)) for event in events]
    covered: list[tuple[float, float]] = []
    for is_waiting in (False, True):
        added, cursor = list[tuple[float, float]](), trace.step.start
        for event, operator, time_class in described:
            if (time_class in _WAITING_CLASSES) is not is_waiting:
                continue
            start, end = clip(event, trace.step)
            free = _subtract(max(start, cursor), end, covered)
            added.extend(free)
            cursor = max(cursor, end)
            name, shapes, context = event.name, "", EventContext()
            if operator is not None:
                name, shapes, context = operator.name, operator.shapes, operator.context
            seconds = sum(stop - begin for begin, stop in free) / 1e6
            yield TimeSlice(name, shapes, time_class, context, seconds)
        covered = sorted([*covered, *added])
    busy = sum(end - start for start, end in covered)
    idle = (trace.step.end - trace.step.start - busy) / 1e6
    yield TimeSlice("no kernel", "", "python", EventContext(), idle)


def _classify_device_event(trace: StepTrace, event: TraceEvent) -> tuple[TraceEvent | None, str]:
    """Return the operator that launched a device event, and the class of the event."""
    operator = trace.operators.get(event.args.get("External id", -1))
    kernel = f"kernel::{event.name}"
    if operator is None:
        return None, classify(kernel, False, EventContext())
    time_class = classify(operator.name, False, operator.context)
    is_graph = operator.name.startswith(_COMPILED_GRAPH)
    if is_graph or time_class in ("python", "other") or _COLLECTIVE.search(event.name):
        time_class = classify(kernel, False, operator.context)
    return operator, time_class


def _subtract(
    start: float, end: float, covered: list[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Return the parts of an interval outside of sorted, disjoint intervals."""
    free = []
    for begin, stop in covered[bisect_right(covered, start, key=itemgetter(1)) :]:
        if begin >= end:
            break
        if begin > start:
            free.append((start, begin))
        start = max(start, stop)
    if start < end:
        free.append((start, end))
    return free
