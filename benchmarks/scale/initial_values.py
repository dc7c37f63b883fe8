"""Initial values of one rank of a 70B layer: CPU seconds, number of sampled values, and memory.

    PYTHONPATH=. python benchmarks/scale/initial_values.py [TP] [DP]

A process per tensor-parallel rank samples the weights of one decoder layer. The rows of each weight
are divided by DP, as with ZeRO-1. First rank 0 samples its columns without the other ranks, as all
ranks did before they exchanged columns, then all ranks exchange them.
"""

import json
import multiprocessing
import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hlat.config.compose import compose_config
from hlat.config.resolve import resolve_config
from hlat.distributed.mesh_axis import MeshAxis
from hlat.distributed.parameter_shards import compute_shard
from hlat.engine import state_shards
from hlat.model.decoder_spec import list_module_parameters, list_parameter_specs
from hlat.model.weight_initialization import compute_initial_values

LAYER = "layers.0."


@dataclass
class Sampler:
    """compute_initial_values with a counter of the sampled values."""

    num_sampled: int = 0

    def __call__(self, parameter: Any, model: Any, seed: int, offset: Any, size: Any) -> Any:
        self.num_sampled += size[0] * parameter.shape[-1] if len(size) > 1 else 0
        return compute_initial_values(parameter, model, seed, offset, size)


def measure(config: Any, tp: int, dp: int, rank: int, store: str, results: Any) -> None:
    """Put rank, method, CPU seconds, numbers of sampled and needed values, and peak bytes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=tp)
    axis = MeshAxis(range(tp), rank, "gloo")
    specs = {spec.name: spec for spec in list_parameter_specs(config.model)}
    owned = []
    for parameter in list_module_parameters(config.model):
        if parameter.name.startswith(LAYER):
            shard = compute_shard(parameter, tp, rank)
            shard = shard.slice_rows(0, -(-shard.shape[0] // dp))
            state = {"weights": torch.zeros(shard.shape, dtype=torch.bfloat16)}
            owned += state_shards.iter_state_shards(state, shard, specs, True)
    for method in ("before", "after"):
        sampler = state_shards.compute_initial_values = Sampler()
        dist.barrier(axis.group)
        start, wall = time.process_time(), time.perf_counter()
        if method == "after":
            state_shards.init_weights(owned, specs, config, axis)
        elif rank == 0:
            for one in owned:
                name = one.name.partition("/")[2]
                values = sampler(specs[name], config.model, 0, one.offset, one.size)
                one.tensor.copy_(torch.from_numpy(values).view(one.tensor.shape))
        row = {
            "rank": rank,
            "method": method,
            "cpu_seconds": time.process_time() - start,
            "wall_seconds": time.perf_counter() - wall,
            "sampled": sampler.num_sampled,
            "kept": sum(one.tensor.numel() for one in owned),
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        if method == "after" or rank == 0:
            results.put(row)
        dist.barrier(axis.group)


def main() -> None:
    """Print rank 0 before, and the mean and maximum over ranks after."""
    tp, dp = (int(argument) for argument in [*sys.argv[1:], "32", "1"][:2])
    config = resolve_config(compose_config(["model=70b"]))
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        arguments = (config, tp, dp)
        processes = [
            context.Process(target=measure, args=(*arguments, rank, f"{directory}/store", results))
            for rank in range(tp)
        ]
        for process in processes:
            process.start()
        rows = [results.get() for _ in range(tp + 1)]
        for process in processes:
            process.join()
    for row in sorted(rows, key=lambda row: (row["method"] == "after", row["rank"])):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
