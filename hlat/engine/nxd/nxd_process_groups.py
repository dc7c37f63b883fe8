"""Mesh axes of NxD's process groups, over the devices and over host memory.

Values exchanged between steps use host memory: a collective on the device would be one more graph
to compile. NxD's rank order follows from the hardware: on trn1 the distance between four
tensor-parallel ranks is eight devices.
"""

from typing import Any

import torch.distributed as dist
from neuronx_distributed.parallel_layers import parallel_state

from hlat.engine.mesh_axis import MeshAxis


def build_host_axes() -> dict[str, MeshAxis]:
    """Return gloo axes pp, dp and tp by name."""
    rank = dist.get_rank()
    return {name: MeshAxis(ranks, rank, "gloo") for name, (ranks, _) in get_nxd_groups().items()}


def build_device_axes() -> dict[str, MeshAxis]:
    """Return the same axes on NxD's process groups over the devices."""
    rank, groups = dist.get_rank(), get_nxd_groups()
    return {name: MeshAxis(ranks, rank, group=group) for name, (ranks, group) in groups.items()}


def get_nxd_groups() -> dict[str, tuple[list[int], Any]]:
    """Return this process's ranks along each axis, in torch's order, and NxD's group."""
    names = {"pp": "pipeline_model_parallel", "dp": "data_parallel", "tp": "tensor_model_parallel"}
    rank, groups = dist.get_rank(), {}
    for axis, name in names.items():
        replica_groups = getattr(parallel_state, f"get_{name}_replica_groups")()
        ranks = next(sorted(ranks) for ranks in replica_groups if rank in ranks)
        groups[axis] = ranks, getattr(parallel_state, f"get_{name}_group")()
    return groups
