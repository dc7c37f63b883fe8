"""Whether the initial weights follow the rule, and are the same as in every other layout."""

import math

import numpy as np
from numpy.typing import NDArray

from hlat.config.model import Model, ScaledInit
from hlat.diagnosis.gradients import widest
from hlat.diagnosis.patient import Patient
from hlat.diagnosis.verdict import Culprit, Outcome, judged
from hlat.model.initialise import initial_values

_SIGMAS = 6
"""Of what chance does to a standard deviation of n values, 1 / sqrt(2 n) of it."""
_ROUNDED = 2.0**-9
_SHOWN = 3


def check_initialisation(patient: Patient) -> list[Outcome]:
    """Standard deviations, equality across layouts, and that no two weights were drawn alike.

    It comes first: nothing has changed the weights yet.
    """
    config, found = patient.config, patient.whole("weights")
    if not patient.leads:
        return []
    wrong: list[Culprit] = []
    told, worst = [], 0.0
    for name, values in found.items():
        expected = _rule(config.model, name)
        if expected is None:
            expected, measured, allowed = 1.0, float(np.abs(values).mean()), 0.0
        else:
            measured = float(values.astype(np.float64).std())
            allowed = _SIGMAS / math.sqrt(2 * values.size) + _ROUNDED
        gap = abs(measured / expected - 1)
        worst = max(worst, gap)
        if not gap <= allowed:
            wrong.append(Culprit(name, "model"))
            told.append(f"{name} measures {measured:.4g}, and {expected:.4g} by the rule")
        elif not np.array_equal(values, _elsewhere(patient, name)):
            wrong.append(Culprit(name, widest(config)))
            told.append(f"{name} has other values than on one process")
    known = {culprit.part for culprit in wrong}
    for one, other in _alike(found):
        wrong += [] if other in known else [Culprit(other, "model")]
        told.append(f"{other} was drawn like {one}")
    more = f" and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
    return [
        judged(
            "initialisation",
            wrong,
            f"{len(found)} standard deviations are within {worst:.1%} of the rule, all values as "
            "on one process",
            "; ".join(told[:_SHOWN]) + more,
            largest=worst,
        )
    ]


def _rule(model: Model, name: str) -> float | None:
    """The standard deviation that the configuration asks for; None: ones (paper, section IV-C)."""
    if "norm" in name:
        return None
    if not name.endswith(("o_proj.weight", "down_proj.weight")):
        return model.init_std
    ordinal = int(name.split(".")[2]) + 1
    doubled = {ScaledInit.depth: 2 * model.num_layers, ScaledInit.layer: 2 * ordinal}
    return model.init_std / math.sqrt(doubled.get(model.scaled_init, 1))


def _elsewhere(patient: Patient, name: str) -> NDArray[np.float32]:
    """The same parameter drawn whole, in the dtype that is kept of it."""
    config, parameter = patient.config, patient.parameters[name]
    start = (0,) * len(parameter.shape)
    values = initial_values(parameter, config.model, config.run.seed, start, parameter.shape)
    return patient.as_kept(values)


def _alike(found: dict[str, NDArray[np.float32]]) -> list[tuple[str, str]]:
    """Matrices of one shape that are correlated more than chance allows."""
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, values in found.items():
        if values.ndim == 2:
            by_shape.setdefault(values.shape, []).append(name)
    pairs = [
        (one, other)
        for names in by_shape.values()
        for i, other in enumerate(names)
        for one in names[:i]
    ]
    limit = {name: _SIGMAS / math.sqrt(values.size) for name, values in found.items()}
    return [p for p in pairs if abs(_correlation(found[p[0]], found[p[1]])) > limit[p[0]]]


def _correlation(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    return float(np.corrcoef(one.ravel(), other.ravel())[0, 1])
