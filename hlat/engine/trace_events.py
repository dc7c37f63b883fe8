"""Events of a trace of torch.profiler: their nesting, ranges, modules and time.

The trace is the JSON file that Perfetto opens, so that a step can be accounted without torch. A
host event is an operator, or a range of `record_function`. A device event is a kernel or a copy.
"""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hlat.precision.record_range import RANGE_PREFIX

MODULE_PREFIX = "module::"
"""Start of the names of ranges of the forward pass of a module."""
STEP_RANGE = f"{RANGE_PREFIX}step"
"""Range of a whole step."""
BACKWARD_NODE = "autograd::engine::evaluate_function: "
"""Start of the names of events that contain the operators of a backward pass."""
_HOST_CATEGORIES = {"cpu_op", "user_annotation"}
_DEVICE_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
_FSDP_RANGES = {"FSDP::post_backward_reduce": "gradient_reduction", "FSDP::": "communication"}
"""Class by the start of the names of FSDP2's ranges; the first match applies."""


@dataclass(frozen=True)
class EventContext:
    """Ranges around an event.

    Attributes:
        range: Class of the innermost range; empty without one.
        module: Name of the innermost module; empty outside of modules.
        is_backward: True in the backward pass; range and module are then those of the forward pass
            of the operator.
    """

    range: str = ""
    module: str = ""
    is_backward: bool = False


@dataclass(eq=False)
class TraceEvent:
    """An event of a trace, with times in microseconds."""

    name: str
    category: str
    start: float
    end: float
    thread: Any = 0
    args: Mapping[str, Any] = field(default_factory=dict)
    children: "list[TraceEvent]" = field(default_factory=list)
    context: EventContext = EventContext()

    @property
    def is_range(self) -> bool:
        """True for a range of `record_function`, False for an operator."""
        return self.category == "user_annotation"

    @property
    def shapes(self) -> str:
        """Shapes of the input tensors, such as `[8, 256] [256, 128]`."""
        dims = self.args.get("Input Dims") or ()
        return " ".join(str(shape) for shape in dims if shape and shape != [[]])


@dataclass(frozen=True)
class StepTrace:
    """Events of one step.

    Attributes:
        step: Range of the step, with the nested host events of its thread.
        operators: Host events of all threads by external id.
        device_events: Kernels and copies, in the order of their start.
    """

    step: TraceEvent
    operators: Mapping[int, TraceEvent]
    device_events: list[TraceEvent]


def load_trace(path: Path) -> StepTrace:
    """Return the step in a trace, which may be compressed with gzip.

    Raises:
        ValueError: The file contains no trace of a step.
    """
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    return build_step_trace(
        TraceEvent(
            row["name"],
            row.get("cat", ""),
            float(row["ts"]),
            float(row["ts"]) + float(row["dur"]),
            (row.get("pid"), row.get("tid")),
            row.get("args", {}),
        )
        for row in json.loads(content)["traceEvents"]
        if row.get("ph") == "X"
    )


def build_step_trace(events: Iterable[TraceEvent]) -> StepTrace:
    """Nest the events, set their contexts, and return the step.

    Raises:
        ValueError: The events contain no range of a step.
    """
    host, device = list[TraceEvent](), list[TraceEvent]()
    for event in sorted(events, key=lambda event: (event.start, -event.end)):
        if event.category in _HOST_CATEGORIES:
            host.append(event)
        elif event.category in _DEVICE_CATEGORIES:
            device.append(event)
    step = next((event for event in host if event.name == STEP_RANGE), None)
    if step is None:
        raise ValueError(f"the trace contains no range {STEP_RANGE}")
    _nest(host)
    operators = {event.args["External id"]: event for event in host if "External id" in event.args}
    return StepTrace(step, operators, device)


def _nest(events: list[TraceEvent]) -> None:
    """Set children and context of host events, given in the order of their start.

    The operators of the forward pass start before those of the backward pass, and the sequence
    number of a node is that of its operator.
    """
    stacks: dict[Any, list[TraceEvent]] = defaultdict(list)
    forward: dict[int, EventContext] = {}
    for event in events:
        stack = stacks[event.thread]
        while stack and stack[-1].end <= event.start:
            stack.pop()
        if stack:
            event.end = min(event.end, stack[-1].end)  # times are rounded
            stack[-1].children.append(event)
        stack.append(event)
        outer = stack[-2].context if len(stack) > 1 else EventContext()
        event.context = _compute_context(event, outer, forward)
        number = event.args.get("Sequence number")
        if number is not None and not event.context.is_backward:
            forward[number] = event.context


def _compute_context(
    event: TraceEvent, outer: EventContext, forward: Mapping[int, EventContext]
) -> EventContext:
    """Return the context of an event within another context."""
    if event.name.startswith(BACKWARD_NODE):
        origin = forward.get(event.args.get("Sequence number", -1), EventContext())
        return EventContext(origin.range, origin.module, is_backward=True)
    if event.name.startswith(RANGE_PREFIX) and event.name != STEP_RANGE:
        name = event.name.removeprefix(RANGE_PREFIX)
        return EventContext(name, outer.module, outer.is_backward)
    if event.name.startswith(MODULE_PREFIX):
        module = event.name.removeprefix(MODULE_PREFIX)
        return EventContext(outer.range, module, outer.is_backward)
    for prefix, name in _FSDP_RANGES.items():
        if event.name.startswith(prefix):
            return EventContext(name, outer.module, outer.is_backward)
    return outer


def clip(event: TraceEvent, window: TraceEvent) -> tuple[float, float]:
    """Return start and end of an event within a window; the end is not before the start."""
    start = max(event.start, window.start)
    return start, max(start, min(event.end, window.end))
