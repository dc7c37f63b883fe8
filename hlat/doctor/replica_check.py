"""Check that replicas stay bit-identical over some steps with the rounding of the recipe."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from hlat.config.run import Config
from hlat.distributed.mesh_coordinates import compute_mesh_coordinates, compute_parallel_degrees
from hlat.doctor.check_result import CheckResult, FaultLocation, build_result, skip_check
from hlat.doctor.engine_harness import EngineHarness

_NUM_STEPS = 4
_LEARNING_RATE = 2.0**-9
"""Updates most weights by less than a bf16 spacing, so that the result depends on the rounding."""
_MAX_MEASURED = 3
"""Tensors for which the drift is measured."""


def check_replicas(harness: EngineHarness) -> Iterator[CheckResult]:
    """Check that all replicas of weights and moments are bit-identical after some steps."""
    config = harness.config
    if config.num_processes == (1 if config.model.tie_embeddings else config.parallelism.pp):
        yield skip_check("replicas", "no two ranks have replicas of the same tensor")
        return
    harness.train(_NUM_STEPS, _LEARNING_RATE)
    engine = harness.engine
    mismatches = [asdict(mismatch) for mismatch in engine.find_replica_mismatches()]
    gathered = engine.parallel_state.world_group.gather_object(mismatches)
    ranks_by_name = harness.broadcast_object(
        {item["name"]: item["ranks"] for items in gathered for item in items}
    )
    names = [*ranks_by_name][:_MAX_MEASURED]
    drift = _measure_drift(harness, names)
    faults = [
        FaultLocation(name.partition("/")[2], _find_axis(config, ranks))
        for name, ranks in ranks_by_name.items()
    ]
    yield build_result(
        "replicas",
        [*dict.fromkeys(faults)],
        f"all replicas are bit-identical after {_NUM_STEPS} steps",
        f"after {_NUM_STEPS} steps the replicas of {len(ranks_by_name)} tensors differ by up "
        f"to {drift:.1e}, for example {', '.join(names)}",
        drift=drift,
        differing=len(ranks_by_name),
    )


def _find_axis(config: Config, ranks: Iterable[int]) -> str:
    """Return the axis along which the ranks differ from one another."""
    degrees = compute_parallel_degrees(config.parallelism, config.num_processes)
    coordinates = [compute_mesh_coordinates(rank, degrees) for rank in ranks]
    return next(
        axis for axis in ("dp", "pp", "tp") if len({getattr(one, axis) for one in coordinates}) > 1
    )


def _measure_drift(harness: EngineHarness, names: list[str]) -> float:
    """Return the largest difference between replicas of the named tensors."""
    replicas: dict[str, list[NDArray[np.float32]]] = {}
    for name, offset, size, values in harness.gather_chunks(lambda chunk: chunk.name in names):
        replicas.setdefault(f"{name}{offset}{size}", []).append(values)
    differences = [
        float(np.abs(values[0] - other).max())
        for values in replicas.values()
        for other in values[1:]
    ]
    drift: float = harness.broadcast_object(max(differences, default=0.0))
    return drift
