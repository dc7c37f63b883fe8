"""Record the graphs of a rank with torch_xla's collectives without execution.

XLA's client for CPUs executes no collective between processes, so tests/nxd/support/collectives.py
replaces them. Here they stay in the graphs. Each synchronization records its graph instead of
compiling it, and the host reads zeros, as with NEURON_EXTRACT_GRAPHS_ONLY.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch.utils._python_dispatch import TorchDispatchMode

_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.copy_.default,
}


class GraphRecorder(TorchDispatchMode):
    """Graphs in the order of their synchronization, and the reads of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[str] = []
        self.reads: list[str] = []

    def sync(self, *_: Any, **__: Any) -> None:
        """Record the graph of all pending tensors, as `torch_xla.sync` would execute it."""
        device = str(xm.xla_device())
        self._record([])
        torch_xla._XLAC._clear_pending_irs(device)
        torch_xla._XLAC._xla_step_marker(device, [], wait=True)  # uploads what is on the host

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function not in _READS:
            return function(*args, **kwargs)
        if function is torch.ops.aten.copy_.default:
            target, source = args[:2]
            if target.device.type != "cpu" or source.device.type != "xla":
                return function(*args, **kwargs)
            return target.copy_(self._read(source, target.dtype, function))
        source = args[0]
        if source.device.type != "xla":
            return function(*args, **kwargs)
        if function is torch.ops.aten._local_scalar_dense.default:
            return self._read(source, source.dtype, function).item()
        if torch.device(kwargs.get("device") or source.device).type != "cpu":
            return function(*args, **kwargs)
        return self._read(source, kwargs.get("dtype") or source.dtype, function)

    def _read(self, source: torch.Tensor, dtype: torch.dtype, function: Any) -> torch.Tensor:
        self.reads.append(str(function))
        if any(torch_xla._XLAC._check_tensor_need_materialization([source])):
            self._record([source])
        return torch.zeros(source.shape, dtype=dtype)

    def _record(self, tensors: list[torch.Tensor]) -> None:
        device = str(xm.xla_device())
        try:
            text = torch_xla._XLAC._get_stablehlo(tensors, device, [], False).decode()
            graph = _normalize_stablehlo(text)
        except RuntimeError as error:  # a collective over several tensors has no StableHLO
            _, found, text = str(error).partition("Original HLO dump:\n")
            if not found:
                raise
            graph = _normalize_hlo(text)
        if graph:
            self.graphs.append(graph)


def _normalize_stablehlo(text: str) -> str:
    """Return a graph without results that are parameters, since a device gets no such graph."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if "func.func @main" in line), None)
    if start is None:
        return ""
    stop = next(
        i for i, line in enumerate(lines[start:], start) if line.strip().startswith("return")
    )
    body, results = lines[start + 1 : stop], re.findall(r"%\w+(?:#\d+)?", lines[stop])
    if not body:
        return ""
    results = [name for name in results if not name.startswith("%arg")]
    parameters = dict(re.findall(r"(%arg\d+): (tensor<[^>]*>)", lines[start]))
    return _rename("\n".join([*body, f"return {', '.join(results)}"]), r"%arg\d+\b", parameters)


def _normalize_hlo(text: str) -> str:
    """Do the same for the text of an HloModule."""
    before, _, entry = text.partition("\nENTRY ")
    lines = re.sub(r"/\*index=\d+\*/", "", entry).splitlines()[1:]
    lines = [line.strip().partition(", metadata=")[0] for line in lines]
    found = (re.fullmatch(r"(\S+) = (\S+) parameter\(\d+\)", line) for line in lines)
    parameters = {match[1]: match[2] for match in found if match}
    (root,) = [line for line in lines if line.startswith("ROOT ")]
    results = root.rpartition(" tuple(")[2].rstrip(")").split(", ")
    body = [line for line in lines if not line.startswith("ROOT ") and " parameter(" not in line]
    regions = before.partition("\n")[2]  # without the layout of the parameters
    body = [
        regions,
        *body,
        f"return {', '.join(name for name in results if name not in parameters)}",
    ]
    return _rename("\n".join(body), r"(?<![\w.-])[A-Za-z_][\w-]*\.\d+\b", parameters)


def _rename(text: str, pattern: str, parameters: dict[str, str]) -> str:
    """Number the names of a graph in order, and put the types of its parameters first."""
    names: dict[str, str] = {}
    for name in re.findall(pattern, text):
        names.setdefault(name, f"%p{len(names)}" if name in parameters else f"%{len(names)}")
    types = [f"{names[name]}: {parameters[name]}" for name in names if name in parameters]
    return f"({', '.join(types)})\n" + re.sub(pattern, lambda found: names[found[0]], text)


@contextmanager
def recorded() -> Iterator[GraphRecorder]:
    """Record the graphs of this rank until the end of the process."""
    recorder = GraphRecorder()
    with (
        mock.patch.object(torch_xla, "sync", recorder.sync),
        mock.patch.object(xm, "mark_step", recorder.sync),
        mock.patch.object(xm, "unlazy", recorder.sync),
        recorder,
    ):
        yield recorder
