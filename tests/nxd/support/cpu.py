"""Run NxD's unmodified code in several processes on the CPU.

`gloo`: NxD's CPU mode with CPU tensors of torch and process groups of gloo; fast, exact values.
`xla`: lazy tensors of torch_xla's CPU client, with the branches of NxD for Trainium; slow, and
closer to a device. `graphs`: `xla` with torch_xla's collectives, which can be traced but not
executed (tests/nxd/support/graphs.py).

NxD's CPU mode supports single layers only, and XLA's client one process. So some functions of torch
and torch_xla are replaced, with `gloo` a few of NxD too, each with its reason.
"""

import functools
import importlib
import os
from typing import Any

import torch.distributed as dist
import torch_xla.core.xla_env_vars
import torch_xla.distributed.xla_backend  # puts its new_group in the place of torch's
import torch_xla.runtime

from tests.nxd.support import collectives, stand_ins
from tests.nxd.support.ranks import MODES


def install(mode: str) -> None:
    """Make neuronx_distributed importable and runnable; once, before a process group is formed."""
    assert mode in (*MODES, "graphs")
    os.environ |= {"NXD_CPU_MODE": str(int(mode == "gloo")), "PJRT_DEVICE": "CPU"}
    stand_ins.install()
    _count_processes()
    _begin_groups(mode)
    collectives.install(rendezvous_only=mode == "graphs")
    if mode == "gloo":
        importlib.import_module("tests.nxd.support.eager").install()


def _count_processes() -> None:
    """Set rank and world size in torch_xla, which supports one process; all are on one host."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name in ("global_ordinal", "local_ordinal"):
        setattr(torch_xla.runtime, name, lambda: rank)
    for name in ("world_size", "global_device_count"):
        setattr(torch_xla.runtime, name, lambda: size)
    # NxD's get_local_world_size reads the variable by a name that torch_xla removed
    torch_xla.core.xla_env_vars.HOST_WORLD_SIZE = "HOST_WORLD_SIZE"
    os.environ["HOST_WORLD_SIZE"] = "1"


def _begin_groups(mode: str) -> None:
    """Replace init_process_group("xla", init_method="xla://") of training programs."""
    begin = dist.init_process_group

    @functools.wraps(begin)
    def init_process_group(backend: str | None = None, **options: Any) -> None:
        if backend == "xla":
            options.pop("init_method", None)  # torch_xla's init_method reads the rank from XLA
            backend = "gloo" if mode == "gloo" else "xla"
        begin(backend, **options)

    dist.init_process_group = init_process_group
