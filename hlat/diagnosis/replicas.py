"""Whether what ranks hold copies of stays the same on all of them, under the recipe's rounding."""

import base64
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np

from hlat.config.run import Config
from hlat.diagnosis.patient import Patient, batch, lively
from hlat.diagnosis.verdict import Culprit, Outcome, judged, not_applicable
from hlat.parallelism.mesh import coordinates, degrees

_STEPS = 4
_RATE = 2.0**-9
"""Moves most weights by less than a spacing of bf16, so that it is up to the rounding where to."""
_MEASURED = 3
"""Tensors of which the drift is measured."""


def check_replicas(patient: Patient) -> list[Outcome]:
    """After some steps, all copies of weights and moments hold the same bits."""
    config = patient.config
    if config.num_processes == config.parallelism.pp:
        return [not_applicable("replicas", "no two ranks hold copies of anything")]
    patient.fill(lively(config))
    patient.forget()
    for seed in range(_STEPS):
        patient.train(batch(config, seed), _RATE)
    engine = patient.engine
    differing = [asdict(one) for one in engine.compare_copies()]
    told = [one for found in engine.world.everyone.collect(differing) for one in found]
    apart = patient.tell({one["name"]: one["ranks"] for one in told})
    drift = _drift(patient, [*apart][:_MEASURED])
    found = [Culprit(name.partition("/")[2], _axis(config, ranks)) for name, ranks in apart.items()]
    return [
        judged(
            "replicas",
            [*dict.fromkeys(found)],
            f"all copies hold the same bits after {_STEPS} steps",
            f"after {_STEPS} steps ranks hold different copies of {len(apart)} tensors, such as "
            f"{', '.join([*apart][:_MEASURED])}; they are {drift:.1e} apart",
            drift=drift,
            differing=len(apart),
        )
    ]


def _axis(config: Config, ranks: Iterable[int]) -> str:
    """The axis along which some ranks differ from one another."""
    shape = degrees(config.parallelism, config.num_processes)
    places = [coordinates(rank, shape) for rank in ranks]
    return "dp" if len({place.dp for place in places}) > 1 else "tp"


def _drift(patient: Patient, names: list[str]) -> float:
    """The largest difference between copies of some tensors; not finite counts as infinite."""
    pieces = [
        [chunk.name, chunk.offset, chunk.size, _packed(chunk.tensor)]
        for chunk in patient.engine.chunks()
        if chunk.name in names
    ]
    told = patient.engine.world.everyone.collect(pieces)
    copies: dict[str, list[Any]] = {}
    for name, offset, size, content in (piece for pieces in told for piece in pieces):
        values = np.frombuffer(base64.b64decode(content), np.float32)
        copies.setdefault(f"{name}{offset}{size}", []).append(values)
    gaps = [np.abs(np.subtract(*pair)).max() for pair in _pairs(copies.values())]
    found: float = patient.tell(float(max(gaps, default=0.0)))
    return found


def _pairs(copies: Iterable[list[Any]]) -> list[tuple[Any, Any]]:
    return [(same[0], other) for same in copies for other in same[1:]]


def _packed(tensor: Any) -> str:
    values = tensor.detach().float().cpu().contiguous().numpy()
    return base64.b64encode(values.tobytes()).decode()
