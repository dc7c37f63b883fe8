"""A device that torch has never heard of, whose arithmetic is the CPU's.

It stands for the accelerators that nobody has at hand. Like them it refuses to compute with tensors
of two devices, to show its memory to NumPy, and to know any name that torch gives a vendor's device.
It has no fused AdamW, which torch accepts for such a device when the optimizer is built.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_iter, tree_map

from hlat.config.run import Config
from hlat.engine import device_checks
from hlat.engine.native.native_engine import NativeEngine
from hlat.recovery import preflight
from tests.distributed import checks

COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}
"""Operations that may see two devices."""
LIBRARY = torch.library.Library("aten", "IMPL")
"""What is written for the device here; torch forgets it when nobody holds it."""


class ShimTensor(Tensor):
    """A tensor on the device, with its content in a tensor of the CPU."""

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

    def tolist(self) -> Any:
        """What torch does for the tensors of a real device, and not for classes of Python."""
        return self.content.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._fused_adamw_.default:
            raise NotImplementedError(f"{func} has no kernel for shim:0")
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
    """What torch.tensor calls, past __torch_dispatch__."""
    _content(target).copy_(_content(source))
    return target


class _Module(backend_registration._DummyBackendModule):
    """What torch asks of a device's module; streams are the CPU's, which does all in turn."""

    Stream, Event = torch.cpu.Stream, torch.cpu.Event
    current_stream, stream = staticmethod(torch.cpu.current_stream), staticmethod(torch.cpu.stream)

    def device_count(self) -> int:
        return 2

    def get_rng_state(self, device: torch.device) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: torch.device) -> None:
        torch.set_rng_state(state)


def plug_in() -> None:
    """Let torch know the device, for as long as this process lives."""
    if torch._C._get_privateuse1_backend_name() == "shim":
        return
    backend_registration._setup_privateuseone_for_python_backend("shim", _Module())
    aten = torch.ops.aten
    for overload in (aten.empty.memory_format, aten.empty_strided.default, aten.arange.start_step):
        LIBRARY.impl(overload, _make(overload), "PrivateUse1")
    LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")
    dist.Backend.default_device_backend_map["shim"] = "gloo"


def train(config: Config, steps: int) -> list[tuple[float, ...]]:
    """What checks.train returns, where the device is plugged in, whether it is used or not."""
    plug_in()
    return checks.train(config, steps)


def passes(config: Config, folder: str) -> bool:
    """Whether the device passes pre-flight, with the effort that its CPU is worth."""
    plug_in()
    with mock.patch.object(device_checks, "_ACCELERATOR_BURN_IN", device_checks._CPU_BURN_IN):
        engine = NativeEngine()
        well = preflight.run_preflight(config, Path(folder), engine)
        engine.close()
    return well
