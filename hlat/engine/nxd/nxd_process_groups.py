"""Mesh axes of NxD's process groups, over the devices and over host memory.

Values exchanged between steps use host memory: a collective on the device would be one more graph
to compile. NxD's rank order follows from the hardware: on trn1 the distance between four
tensor-parallel ranks is eight devices.
"""

import torch.distributed as dist
from neuronx_distributed.parallel_layers import parallel_state

from hlat.distributed.mesh_axis import MeshAxis
from hlat.distributed.mesh_object_group import add_background_axes
from hlat.distributed.process_groups import Partition, create_axes

_NXD_NAMES = {
    "pp": "pipeline_model_parallel",
    "dp": "data_parallel",
    "tp": "tensor_model_parallel",
}


def build_host_axes() -> dict[str, MeshAxis]:
    """Return gloo axes pp, dp and tp, and those of background threads, by name."""
    partitions = {name: _list_nxd_partition(name) for name in _NXD_NAMES}
    return create_axes(add_background_axes(partitions), dist.get_rank(), "gloo")


def build_device_axes() -> dict[str, MeshAxis]:
    """Return the axes pp, dp and tp on NxD's process groups over the devices."""
    rank, axes = dist.get_rank(), {}
    for name, nxd_name in _NXD_NAMES.items():
        ranks = next(ranks for ranks in _list_nxd_partition(name) if rank in ranks)
        axes[name] = MeshAxis(ranks, rank, getattr(parallel_state, f"get_{nxd_name}_group")())
    return axes


def _list_nxd_partition(name: str) -> Partition:
    """Return the ranks along an axis, in torch's order."""
    groups = getattr(parallel_state, f"get_{_NXD_NAMES[name]}_replica_groups")()
    return [sorted(ranks) for ranks in groups]
