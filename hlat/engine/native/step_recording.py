"""Record of a training step with torch.profiler.

Modules record the ranges of their forward passes through hooks, which exist during the step only.
Within a compiled layer no hooks are called, so that the layer is one range.
"""

import gzip
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import profile, record_function

from hlat.config.profiler import ProfilerConfig
from hlat.engine.trace_events import MODULE_PREFIX, STEP_RANGE
from hlat.model.decoder import Decoder, DecoderLayer
from hlat.precision.record_range import record_ranges


class TorchStepRecording:
    """Implementation of hlat.engine.interface.StepRecording, which the constructor starts."""

    def __init__(
        self,
        settings: ProfilerConfig,
        model_parts: Mapping[int, Decoder],
        device: torch.device,
        is_compiled: bool,
    ) -> None:
        self._device_module: Any = torch.get_device_module(device)
        self._memory: Any = None
        if settings.memory:
            self._memory = getattr(self._device_module, "memory", None)
        self._records_memory = hasattr(self._memory, "_record_memory_history")
        self._profile = profile(
            record_shapes=True, with_stack=settings.with_stack, profile_memory=settings.memory
        )
        with ExitStack() as stack:
            if self._records_memory:
                self._memory._record_memory_history(stacks="python")  # those of C++ take minutes
                stack.callback(self._memory._record_memory_history, enabled=None)
            self._profile.start()
            stack.callback(self._profile.stop)
            for name, module in _iter_recorded_modules(model_parts, is_compiled):
                _record_forward(name, module, stack)
            stack.enter_context(record_ranges())
            self._exit_stack = stack.pop_all()
        self._step_range = record_function(STEP_RANGE)
        self._step_range.__enter__()  # type: ignore[no-untyped-call]

    def stop(self, memory_path: Path) -> None:
        """Wait for the device and stop; write the snapshot of the memory, if it is recorded."""
        with self._exit_stack:
            if hasattr(self._device_module, "synchronize"):
                self._device_module.synchronize()
            self._step_range.__exit__(None, None, None)
            if self._records_memory:
                self._memory._dump_snapshot(str(memory_path))

    def write_trace(self, path: Path) -> None:
        """Write the trace as JSON compressed with gzip."""
        partial = path.with_suffix(".partial")
        try:
            self._profile.export_chrome_trace(str(partial))
            with partial.open("rb") as content, gzip.open(path, "wb", compresslevel=6) as file:
                shutil.copyfileobj(content, file)
        finally:
            partial.unlink(missing_ok=True)


def _iter_recorded_modules(
    model_parts: Mapping[int, Decoder], is_compiled: bool
) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of all modules, without those within a compiled layer."""
    for part in model_parts.values():
        compiled = {
            inner
            for layer in part.layers.values()
            for inner in layer.modules()
            if is_compiled and not isinstance(inner, DecoderLayer)
        }
        for name, module in part.named_modules():
            if module not in compiled:
                yield name or "model", module


def _record_forward(name: str, module: nn.Module, stack: ExitStack) -> None:
    """Record the forward passes of a module as ranges until the stack is closed."""
    ranges: list[Any] = []

    def enter_range(*_: Any) -> None:
        ranges.append(record_function(MODULE_PREFIX + name))
        ranges[-1].__enter__()

    def exit_range(*_: Any) -> None:
        ranges.pop().__exit__(None, None, None)

    stack.callback(module.register_forward_pre_hook(enter_range, prepend=True).remove)
    # Activation checkpointing ends a recomputed forward pass with an exception
    stack.callback(module.register_forward_hook(exit_range, always_call=True).remove)
