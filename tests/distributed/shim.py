"""A device without built-in support in torch, simulated on the CPU.

It replaces accelerators that are not available in tests. Like these, it rejects operations on
tensors of two devices and has no NumPy access to its memory. It has no name of a vendor's device,
and no fused AdamW, which torch accepts for such a device when the optimizer is built.
"""

import dataclasses
import gc
import weakref
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from hlat.config.run import Config
from hlat.engine import device_checks
from hlat.engine.native.native_engine import NativeEngine
from hlat.optim import optimizer_factory
from hlat.recovery import preflight
from tests.distributed import checks

COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}
"""Operations that accept tensors of two devices."""
READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
}
"""Operations for which the host waits for the device, besides copies to the CPU."""
LIBRARY = torch.library.Library("aten", "IMPL")
"""Kernels of the device. The reference is needed: torch removes them with the object."""


class Usage:
    """Memory and communication of the device.

    Attributes:
        live: Bytes allocated now.
        peak: Largest value of `live` since the last reset.
        sent: Bytes of messages since the last reset by number of elements of the full tensor, if
            each collective is a ring of two ranks.
    """

    def __init__(self) -> None:
        self._references: Counter[int] = Counter()
        self._nbytes: dict[int, int] = {}
        self.live = 0
        self.reset()

    def reset(self) -> None:
        """Reset the peak and the bytes of messages."""
        self.peak, self.sent = self.live, Counter[int]()

    def allocate(self, tensor: "ShimTensor") -> None:
        """Count the memory of a tensor until its last view is deleted."""
        storage = tensor.content.untyped_storage()
        self._references[storage._cdata] += 1
        self._set_size(storage._cdata, storage.nbytes())
        weakref.finalize(tensor, self._release, storage._cdata)

    def resize(self, tensor: "ShimTensor", nbytes: int) -> None:
        """Change the size of the memory of a tensor and of its views, as FSDP2 does."""
        storage = tensor.content.untyped_storage()
        storage.resize_(nbytes)
        self._set_size(storage._cdata, nbytes)

    def _set_size(self, address: int, nbytes: int) -> None:
        self.live += nbytes - self._nbytes.get(address, 0)
        self._nbytes[address] = nbytes
        self.peak = max(self.peak, self.live)

    def _release(self, address: int) -> None:
        self._references[address] -= 1
        if not self._references[address]:
            del self._references[address]
            self.live -= self._nbytes.pop(address)

    def send(self, name: str, args: Any) -> None:
        """Count the bytes of a collective or of a message."""
        if name not in _RINGS:
            return
        index, num_rings = _RINGS[name]
        tensors = args[index] if isinstance(args[index], list | tuple) else [args[index]]
        for tensor in tensors:
            nbytes = tensor.numel() * tensor.element_size()
            self.sent[tensor.numel()] += nbytes * num_rings // 2


USAGE = Usage()
_RINGS = {
    "c10d::allreduce_": (0, 2),
    "c10d::_allgather_base_": (0, 1),
    "c10d::_reduce_scatter_base_": (1, 1),
    "c10d::send": (0, 2),
}
"""Index of the full tensor in the arguments, and number of transfers of a half of it."""


class ShimTensor(Tensor):
    """Tensor on the device with its content in a CPU tensor."""

    @staticmethod
    def __new__(cls, content: Tensor) -> "ShimTensor":
        return Tensor._make_wrapper_subclass(
            cls,
            content.shape,
            strides=content.stride(),
            storage_offset=content.storage_offset(),
            dtype=content.dtype,
            device="shim:0",
        )

    def __init__(self, content: Tensor) -> None:
        self.content = content
        USAGE.allocate(self)

    def tolist(self) -> Any:
        """Return the values as a list, which torch supports for real devices only."""
        return self.content.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._fused_adamw_.default:
            raise NotImplementedError(f"{func} has no kernel for shim:0")
        if func.namespace == "c10d":
            USAGE.send(func._schema.name, args)
        given = [leaf for leaf in tree_iter((args, kwargs or {})) if isinstance(leaf, Tensor)]
        foreign = [t for t in given if not isinstance(t, ShimTensor) and t.dim() > 0]
        if foreign and func not in COPIES:
            raise RuntimeError(f"{func} with tensors on shim:0 and {foreign[0].device}")
        wrappers = {id(t.content): t for t in given if isinstance(t, ShimTensor)}
        device = (kwargs or {}).get("device")
        here = device is None or torch.device(device).type == "shim"

        def wrap(result: Any) -> Any:
            if not isinstance(result, Tensor) or not here:
                return result
            return wrappers[id(result)] if id(result) in wrappers else ShimTensor(result)

        found = func(*tree_map(_content, args), **tree_map(_content, kwargs or {}))
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], ShimTensor):
            return args[0]
        return tree_map(wrap, found)


def _content(value: Any) -> Any:
    if isinstance(value, ShimTensor):
        return value.content
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _make(function: Any) -> Any:
    def made(*args: Any, device: Any = None, pin_memory: Any = None, **kwargs: Any) -> Tensor:
        return ShimTensor(function(*args, device="cpu", **kwargs))

    return made


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy a tensor; torch.tensor calls this function without __torch_dispatch__."""
    _content(target).copy_(_content(source))
    return target


_TORCH_ALLOC_STORAGE, _TORCH_FREE_STORAGE = _fsdp_param.alloc_storage, _fsdp_param.free_storage


def _alloc_storage(tensor: Tensor) -> None:
    """Allocate the memory of a gathered parameter; torch would resize the wrapper, which has none."""
    if isinstance(tensor, ShimTensor):
        USAGE.resize(tensor, tensor.numel() * tensor.element_size())
    else:
        _TORCH_ALLOC_STORAGE(tensor)


def _free_storage(tensor: Tensor) -> None:
    if isinstance(tensor, ShimTensor):
        USAGE.resize(tensor, 0)
    else:
        _TORCH_FREE_STORAGE(tensor)


class _Module(backend_registration._DummyBackendModule):
    """Device module for torch with the streams of the CPU, which runs operations in order."""

    Stream, Event = torch.cpu.Stream, torch.cpu.Event
    current_stream, stream = staticmethod(torch.cpu.current_stream), staticmethod(torch.cpu.stream)

    def device_count(self) -> int:
        return 4

    def get_rng_state(self, device: torch.device) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: torch.device) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def register_device() -> None:
    """Register the device in torch until this process ends."""
    if torch._C._get_privateuse1_backend_name() == "shim":
        return
    backend_registration._setup_privateuseone_for_python_backend("shim", _Module())
    aten = torch.ops.aten
    for overload in (aten.empty.memory_format, aten.empty_strided.default, aten.arange.start_step):
        LIBRARY.impl(overload, _make(overload), "PrivateUse1")
    LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")
    dist.Backend.default_device_backend_map["shim"] = "gloo"
    _fsdp_param.alloc_storage, _fsdp_param.free_storage = _alloc_storage, _free_storage


def train(config: Config, steps: int) -> list[tuple[float, ...]]:
    """Return checks.train in a process with the registered device, used or not."""
    register_device()
    return checks.train(config, steps)


class ReadRecorder(TorchDispatchMode):
    """Recorder of the operations for which the host waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = any(isinstance(leaf, ShimTensor) for leaf in tree_iter((args, kwargs or {})))
        if func is torch.ops.aten._to_copy.default:
            reads &= torch.device((kwargs or {}).get("device") or "shim").type == "cpu"
        elif func is torch.ops.aten.copy_.default:
            reads &= not isinstance(args[0], ShimTensor)
        else:
            reads &= func in READS
        if reads:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def record_reads(config: Config, steps: int) -> tuple[list[str], list[str]]:
    """Return the reads of some steps after the first one, and those of a value of the last one."""
    register_device()
    engine = NativeEngine()
    engine.build(config)
    sequences = [checks.shard_batch(batch, engine) for batch in checks.batches(config, 1 + steps)]
    engine.train_step(sequences[0], checks.RATE)
    with ReadRecorder() as in_steps:
        for each in sequences[1:]:
            metrics = engine.train_step(each, checks.RATE)
    with ReadRecorder() as in_read:
        metrics["loss"].item()
    engine.close()
    return in_steps.names, in_read.names


def passes_preflight(config: Config, folder: str) -> bool:
    """Return True if the device passes pre-flight with the burn-in of a CPU."""
    register_device()
    with mock.patch.object(device_checks, "_ACCELERATOR_BURN_IN", device_checks._CPU_BURN_IN):
        engine = NativeEngine()
        is_healthy = preflight.run_preflight(config, Path(folder), engine)
        engine.close()
    return is_healthy


@dataclasses.dataclass
class StepUsage:
    """Bytes of a rank in a step.

    Attributes:
        before: Allocated before the step.
        at_update: Allocated at the start of the update.
        peak: Largest allocation until the update.
        sent: Bytes of messages by the number of elements of the full tensor.
    """

    before: int
    at_update: int
    peak: int
    sent: dict[int, int]


def measure_step(config: Config) -> StepUsage:
    """Return the memory and the communication of the second step."""
    register_device()
    engine = NativeEngine()
    engine.build(config)
    batch = checks.shard_batch(checks.batches(config, 1)[0], engine)
    engine.train_step(batch, checks.RATE)
    gc.collect()
    USAGE.reset()
    usage = StepUsage(USAGE.live, 0, 0, {})
    update = optimizer_factory.step_optimizer

    def record(*args: Any) -> None:
        usage.at_update, usage.peak = USAGE.live, USAGE.peak
        update(*args)

    with mock.patch.object(optimizer_factory, "step_optimizer", record):
        engine.train_step(batch, checks.RATE)
    usage.sent = dict(USAGE.sent)
    engine.close()
    return usage
