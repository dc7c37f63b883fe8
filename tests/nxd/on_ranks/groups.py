"""Process groups of NxD for worlds larger than this machine."""

import torch.distributed as dist
from neuronx_distributed.parallel_layers import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore


def along_axes(size: int, tp: int, pp: int, lnc: int) -> dict[str, list[list[int]]]:
    """Return the groups along tp, dp and pp of a world of this size."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    found = parallel_state.initialize_model_parallel(tp, pp, lnc_size=lnc, mesh_only=True)
    return {"tp": found.tp_groups, "dp": found.dp_groups, "pp": found.pp_groups}
