"""Lets this process run NxD's unmodified code on its CPU, together with others.

There are two ways. `gloo`: NxD's own CPU mode, tensors of torch's CPU, process groups of gloo;
quick, and exact about numbers. `xla`: lazy tensors of torch_xla on its CPU client, with the branches
that NxD takes on Trainium; slow, and close to what runs there. `graphs` is `xla` with torch_xla's own
collectives, which can be traced and not executed (tests/nxd/support/graphs.py).

NxD finishes its CPU mode for single layers only, and XLA's client knows of one process, so some
functions of torch and torch_xla are replaced, in `gloo` a few of NxD's too, each with its reason.
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
    """torch_xla believes each process to be the only one; ours are all on one host."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name in ("global_ordinal", "local_ordinal"):
        setattr(torch_xla.runtime, name, lambda: rank)
    for name in ("world_size", "global_device_count"):
        setattr(torch_xla.runtime, name, lambda: size)
    # NxD's get_local_world_size reads a variable whose name torch_xla no longer has
    torch_xla.core.xla_env_vars.HOST_WORLD_SIZE = "HOST_WORLD_SIZE"
    os.environ["HOST_WORLD_SIZE"] = "1"


def _begin_groups(mode: str) -> None:
    """What init_process_group("xla", init_method="xla://") of a training program is to do here."""
    begin = dist.init_process_group

    @functools.wraps(begin)
    def init_process_group(backend: str | None = None, **options: Any) -> None:
        if backend == "xla":
            options.pop("init_method", None)  # torch_xla's asks XLA's client for the rank
            backend = "gloo" if mode == "gloo" else "xla"
        begin(backend, **options)

    dist.init_process_group = init_process_group
