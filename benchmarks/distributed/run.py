"""Measure torch's mesh, DTensors and tensor-parallel styles against hlat's code on a CPU.

Usage:
    export PYTHONPATH=. OMP_NUM_THREADS=1
    torchrun --standalone --nproc-per-node 2 benchmarks/distributed/run.py step
    torchrun --standalone --nproc-per-node 8 benchmarks/distributed/run.py mesh

`step` alternates a training step with tensor parallelism, the update and the gradient norm of its
parameters, local and as DTensors, and an MLP with tensor parallelism. `mesh` alternates two ways to
create the groups of a mesh of [2, size / 4, 2] ranks. Rank 0 updates result.json and README.md.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import get_total_norm

from benchmarks.common import describe_machine, machine, spread, table, write_between
from hlat.config.compose import compose_config
from hlat.config.resolve import resolve_config
from hlat.config.run import Config
from hlat.data.packed_sequences import PackedSequences
from hlat.distributed.device_mesh import init_distributed
from hlat.distributed.mesh_coordinates import ParallelDegrees, partition_ranks
from hlat.distributed.process_groups import create_axes
from hlat.distributed.rank_environment import read_rank_info
from hlat.engine.native.native_engine import NativeEngine
from hlat.engine.native.trainable_parameters import TrainableParameters
from hlat.model.decoder_spec import list_module_parameters
from hlat.model.parameter_spec import ShardingRule
from hlat.optim import optimizer_factory
from hlat.optim.gradient_norm import compute_global_norm

HERE = Path(__file__).resolve().parent
OVERRIDES = [
    "model=tiny",
    "precision=fp32",
    "parallelism.tp=2",
    "batch.global_batch_size=16",
    "batch.micro_batch_size=4",
]
NUM_BLOCKS, HIDDEN, NUM_TOKENS = 4, 256, 1024
STEP, UPDATE, NORM, MLP = "training step", "update", "norm", "MLP"
NUM_CALLS = {STEP: 1, UPDATE: 10, NORM: 10, MLP: 5}
"""Calls of each measurement; all ranks make the same number, because most communicate."""
Step = Callable[..., Any]
Contestants = dict[tuple[str, str], Step]


class Mlp(nn.Module):
    """Residual blocks of a column-parallel and a row-parallel matrix."""

    def __init__(self, num_shards: int, enter: Step, leave: Step) -> None:
        super().__init__()
        width = 4 * HIDDEN // num_shards
        self.up = nn.ModuleList(nn.Linear(HIDDEN, width, bias=False) for _ in range(NUM_BLOCKS))
        self.down = nn.ModuleList(nn.Linear(width, HIDDEN, bias=False) for _ in range(NUM_BLOCKS))
        self._enter, self._leave = enter, leave

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + self._leave(down(nn.functional.silu(up(self._enter(x)))))
        return x


def get_placement(rule: ShardingRule) -> Placement:
    """Return the DTensor placement of a sharding rule."""
    if rule.is_replicated:
        return Replicate()
    return Shard(1) if rule is ShardingRule.row else Shard(0)


def copy_tensors(params: TrainableParameters) -> list[Tensor]:
    """Return copies of the parameters of this rank with random gradients, equal in each call."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    tensors = []
    for name, tensor in params.optimizer_params.items():
        tensors.append(tensor.clone())
        gradient = torch.randn(tensor.shape, generator=generator) * 1e-3
        if params.shards[name].sharding.is_replicated:  # equal on all ranks
            dist.broadcast(gradient, 0)
        tensors[-1].grad = gradient
    return tensors


def wrap_tensors(params: TrainableParameters, mesh: DeviceMesh) -> list[Tensor]:
    """Return `copy_tensors` as DTensors."""
    wrapped: list[Tensor] = []
    for shard, tensor in zip(params.shards.values(), copy_tensors(params), strict=True):
        placements = [get_placement(shard.sharding)]
        assert tensor.grad is not None
        wrapped.append(DTensor.from_local(tensor, mesh, placements, run_check=False))
        wrapped[-1].grad = DTensor.from_local(tensor.grad, mesh, placements, run_check=False)
    return wrapped


def build_optimizers(
    config: Config, params: TrainableParameters, mesh: DeviceMesh
) -> dict[str, torch.optim.Optimizer]:
    """Return optimizers over equal copies of the parameters."""
    settings = config.optimizer
    roles = {each.name: each.specs[0].role for each in list_module_parameters(config.model)}

    def build_groups(tensors: list[Tensor]) -> list[dict[str, Any]]:
        with_roles = [
            (tensor, roles[name]) for name, tensor in zip(params.shards, tensors, strict=True)
        ]
        return optimizer_factory.build_param_groups(settings, with_roles)

    def build(tensors: list[Tensor], **kwargs: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(build_groups(tensors), lr=settings.lr, **kwargs)

    rule = optimizer_factory.get_update_rule(settings)
    groups = build_groups(copy_tensors(params))
    return {
        "hlat": optimizer_factory.build_optimizer(rule, groups, settings.lr),
        "DTensor, fused": build(wrap_tensors(params, mesh), fused=True),
        "local, foreach": build(copy_tensors(params), foreach=True),
        "DTensor, foreach": build(wrap_tensors(params, mesh), foreach=True),
    }


def list_params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the local parameters of an optimizer."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [param.to_local() if isinstance(param, DTensor) else param for param in params]


def build_norms(engine: NativeEngine, mesh: DeviceMesh) -> dict[str, Callable[[], Tensor]]:
    """Return functions that compute the norm of the gradients over all ranks."""
    params = engine.params
    assert isinstance(params, TrainableParameters)
    tensors = dict(zip(params.optimizer_params, copy_tensors(params), strict=True))
    owned = params.select_owned_rows({name: each.grad for name, each in tensors.items()})
    wrapped = [each.grad for each in wrap_tensors(params, mesh) if each.grad is not None]

    def compute_own_norm() -> Tensor:
        squared = compute_global_norm([*owned.values()]).square()
        engine._mesh.all_reduce(squared)
        return squared.sqrt()

    def compute_dtensor_norm() -> Tensor:
        norm = get_total_norm(wrapped)
        assert isinstance(norm, DTensor)
        return norm.full_tensor()

    return {"hlat": compute_own_norm, "DTensor": compute_dtensor_norm}


def build_mlps(engine: NativeEngine, mesh: DeviceMesh) -> dict[str, Mlp]:
    """Return tensor-parallel MLPs with equal weights."""
    regions, rank = engine._regions, dist.get_rank()
    torch.manual_seed(0)
    whole = Mlp(1, lambda x: x, lambda y: y)
    own = Mlp(2, regions.copy_to_tensor_parallel_region, regions.reduce_from_tensor_parallel_region)
    with torch.no_grad():
        for target, source in zip(own.up, whole.up, strict=True):
            target.weight.copy_(source.weight.chunk(2, 0)[rank])
        for target, source in zip(own.down, whole.down, strict=True):
            target.weight.copy_(source.weight.chunk(2, 1)[rank])
    plan = {"up.*": ColwiseParallel(), "down.*": RowwiseParallel()}
    return {"hlat": own, "DTensor": parallelize_module(whole, mesh, plan)}


def run_mlp(mlp: Mlp, x: Tensor) -> Tensor:
    """Run forward and backward passes; return the output."""
    mlp.zero_grad()
    y = mlp(x)
    y.sum().backward()
    return y.detach()


def measure(contestants: Contestants, num_rounds: int) -> dict[tuple[str, str], list[float]]:
    """Return the seconds per call of each contestant, alternating; the first round is warm-up."""
    times: dict[tuple[str, str], list[float]] = {key: [] for key in contestants}
    for _ in range(num_rounds + 1):
        for key, call in contestants.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(NUM_CALLS[key[0]]):
                call()
            times[key].append((time.perf_counter() - start) / NUM_CALLS[key[0]])
    return {key: values[1:] for key, values in times.items()}


def measure_step(num_rounds: int) -> dict[str, Any]:
    """Return the costs of DTensors per training step."""
    config = resolve_config(compose_config(OVERRIDES))
    engine = NativeEngine()
    engine.build(config)
    assert isinstance(engine.params, TrainableParameters)
    group = engine._mesh.tp.group
    assert group is not None
    mesh = DeviceMesh.from_group(group, "cpu")
    shape = (config.batch.global_batch_size, config.batch.sequence_length)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape, np.int32)
    optimizers = build_optimizers(config, engine.params, mesh)
    norms, mlps = build_norms(engine, mesh), build_mlps(engine, mesh)
    torch.manual_seed(1)
    x = torch.randn(NUM_TOKENS, HIDDEN)
    equal = compare(optimizers, norms, mlps, x)
    contestants: Contestants = {
        (STEP, "hlat"): lambda: engine.read_metrics(
            engine.train_step(PackedSequences(tokens), 1e-4)
        )
    }
    contestants |= {(UPDATE, name): each.step for name, each in optimizers.items()}
    contestants |= {(NORM, name): norm for name, norm in norms.items()}
    contestants |= {(MLP, name): lambda m=mlp: run_mlp(m, x) for name, mlp in mlps.items()}
    times = measure(contestants, num_rounds)
    rows = [
        {
            "measured": kind,
            "contestant": name,
            "milliseconds": spread([1e3 * second for second in values]),
            "milliseconds_by_round": [float(f"{1e3 * second:.4g}") for second in values],
            "ratio": spread([a / b for a, b in zip(values, times[kind, "hlat"], strict=True)]),
            "added_share_of_step": spread(
                [
                    (a - b) / step
                    for a, b, step in zip(
                        values, times[kind, "hlat"], times[STEP, "hlat"], strict=True
                    )
                ]
            ),
        }
        for (kind, name), values in times.items()
    ]
    tensors = list_params(optimizers["hlat"])
    sizes = {"tensors": len(tensors), "elements": sum(tensor.numel() for tensor in tensors)}
    engine.close()
    return {"overrides": OVERRIDES, "per_rank": sizes, "equal": equal, "rows": rows}


def compare(
    optimizers: dict[str, torch.optim.Optimizer],
    norms: dict[str, Callable[[], Tensor]],
    mlps: dict[str, Mlp],
    x: Tensor,
) -> dict[str, Any]:
    """Compare values of hlat and torch after three updates and one pass."""
    for _ in range(3):
        for optimizer in optimizers.values():
            optimizer.step()
    own = list_params(optimizers["hlat"])
    outputs = {name: run_mlp(mlp, x) for name, mlp in mlps.items()}
    gradients = [
        [param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad for param in each]
        for each in (mlp.parameters() for mlp in mlps.values())
    ]
    own_norm, norm = (norms[name]().item() for name in ("hlat", "DTensor"))
    return {
        "weights after 3 updates": {
            name: all(map(torch.equal, own, list_params(optimizer)))
            for name, optimizer in optimizers.items()
        },
        "norm": {"bit_identical": own_norm == norm, "relative_error": abs(norm / own_norm - 1)},
        "MLP": {
            "output": torch.equal(*outputs.values()),
            "gradients": all(map(torch.equal, *gradients)),
        },
    }


def measure_mesh(num_rounds: int) -> dict[str, Any]:
    """Return the seconds and the calls of new_group in the creation of a mesh."""
    info = read_rank_info()
    init_distributed(info.rank, info.world_size, torch.device("cpu"))
    degrees = ParallelDegrees(dp=info.world_size // 4, tp=2, pp=2)
    names = ("pp", "dp", "tp")
    partitions = {name: partition_ranks(degrees, name) for name in names}
    shape = (degrees.pp, degrees.dp, degrees.tp)
    ways: dict[str, Callable[[], Any]] = {
        "hlat": lambda: create_axes(partitions, info.rank),
        "init_device_mesh": lambda: init_device_mesh("cpu", shape, mesh_dim_names=names),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(num_rounds + 1):
        for name, create in ways.items():
            dist.barrier()
            start = time.perf_counter()
            create()
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    ratios = [b / a for a, b in zip(*seconds.values(), strict=True)][1:]
    calls = {"hlat": len(names), "init_device_mesh": sum(map(len, partitions.values()))}
    dist.destroy_process_group()
    return {
        "ranks": info.world_size,
        "shape": dict(zip(names, shape, strict=True)),
        "calls_of_new_group_per_rank": calls,
        "milliseconds": {k: spread([1e3 * s for s in v[1:]]) for k, v in seconds.items()},
        "ratio": spread(ratios),
    }


def format_range(values: dict[str, float], scale: float = 1.0, unit: str = "") -> str:
    """Return a median with its range in parentheses."""
    median, low, high = (
        f"{float(f'{scale * values[key]:.3g}'):g}{unit}" for key in ("median", "min", "max")
    )
    return f"{median} ({low} to {high})"


def render(result: dict[str, Any]) -> None:
    """Write the tables of README.md."""
    step, mesh = result["step"], result["mesh"]
    header = ["measured", "contestant", "milliseconds", "ratio", "added share of a step"]
    rows = [
        [
            row["measured"],
            row["contestant"],
            format_range(row["milliseconds"]),
            format_range(row["ratio"]),
            format_range(row["added_share_of_step"], 100, "%"),
        ]
        for row in step["rows"]
    ]
    write_between(HERE / "README.md", "step", table(header, rows) + "\n\n" + machine(step))
    header = ["way", "calls of `new_group` per rank", "milliseconds"]
    calls = mesh["calls_of_new_group_per_rank"]
    rows = [[way, str(calls[way]), format_range(mesh["milliseconds"][way])] for way in calls]
    ratio = f"Ratio: {format_range(mesh['ratio'])}. {machine(mesh)}"
    write_between(HERE / "README.md", "mesh", table(header, rows) + "\n\n" + ratio)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["step", "mesh"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, default=HERE / "result.json")
    arguments = parser.parse_args()
    part = {"step": measure_step, "mesh": measure_mesh}[arguments.part](arguments.rounds)
    if read_rank_info().is_rank0:
        old = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
        part = {"rounds": arguments.rounds, **part, "machine": describe_machine(["torch"])}
        result = old | {arguments.part: part}
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
        if result.keys() >= {"step", "mesh"} and arguments.output.parent == HERE:
            render(result)


if __name__ == "__main__":
    main()
