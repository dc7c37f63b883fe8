"""Check of the initial weights: distribution, equality across layouts, and independence."""

import math
from collections.abc import Iterator
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from hlat.config.model import ModelConfig
from hlat.doctor.check_result import (
    CheckResult,
    FaultLocation,
    build_result,
    format_parallel_axes,
)
from hlat.doctor.engine_harness import EngineHarness
from hlat.doctor.reference_parametrization import compute_init_std
from hlat.model.parameter_spec import Initialization, ParameterSpec
from hlat.model.weight_initialization import compute_initial_values
from hlat.recovery.preflight_checks import format_first

_SIGMAS = 6
"""Tolerance in standard errors; that of a standard deviation of n values is 1 / sqrt(2 n)."""
_ROUNDING_TOLERANCE = 2.0**-9


def check_initialisation(harness: EngineHarness) -> Iterator[CheckResult]:
    """Check standard deviations, equality with one process, and that no two weights correlate.

    This check runs first, while the weights are unchanged.
    """
    config, weights = harness.config, harness.gather_full_tensors("weights")
    if not harness.is_rank0:
        return
    faults: list[FaultLocation] = []
    problems, largest = [], 0.0
    for name, values in weights.items():
        spec = harness.parameters[name]
        error, tolerance, problem = _compare_distribution(config.model, spec, values)
        largest = max(largest, error)
        if not error <= tolerance:
            faults.append(FaultLocation(name, "model"))
            problems.append(problem)
        elif not np.array_equal(values, _compute_single_process_values(harness, name)):
            faults.append(FaultLocation(name, format_parallel_axes(config)))
            problems.append(f"{name} differs from its values on one process")
    names = {fault.part for fault in faults}
    for first, second in _find_correlated_pairs(weights):
        faults += [] if second in names else [FaultLocation(second, "model")]
        problems.append(f"{second} is correlated with {first}")
    yield build_result(
        "initialisation",
        faults,
        f"{len(weights)} standard deviations are within {largest:.1%} of the configured ones, "
        "and all values are as on one process",
        format_first(problems, separator="; "),
        largest=largest,
    )


def _compare_distribution(
    model: ModelConfig, spec: ParameterSpec, values: NDArray[np.float32]
) -> tuple[float, float, str]:
    """Return the error of initial values, its tolerance, and the description of the difference."""
    if spec.init is not Initialization.normal:
        constant = float(spec.init is Initialization.ones)
        error = float(np.abs(values - np.float32(constant)).max())
        return error, 0.0, f"{spec.name} differs from {constant:g} by up to {error:.4g}"
    expected = compute_init_std(model, spec.name)
    measured = float(values.astype(np.float64).std())
    tolerance = _SIGMAS / math.sqrt(2 * values.size) + _ROUNDING_TOLERANCE
    problem = f"{spec.name} has standard deviation {measured:.4g}, expected {expected:.4g}"
    return abs(measured / expected - 1), tolerance, problem


def _compute_single_process_values(harness: EngineHarness, name: str) -> NDArray[np.float32]:
    """Return the initial values of the full parameter, in the dtype of the weights."""
    config, spec = harness.config, harness.parameters[name]
    start = (0,) * len(spec.shape)
    values = compute_initial_values(
        spec, config.model, config.run.resolved_init_seed, start, spec.shape
    )
    return harness.round_to_weight_dtype(values)


def _find_correlated_pairs(weights: dict[str, NDArray[np.float32]]) -> list[tuple[str, str]]:
    """Return pairs of matrices of equal shape with a correlation above chance."""
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, values in weights.items():
        if values.ndim == 2:
            by_shape.setdefault(values.shape, []).append(name)
    return [
        (first, second)
        for names in by_shape.values()
        for first, second in combinations(names, 2)
        if abs(np.corrcoef(weights[first].ravel(), weights[second].ravel())[0, 1])
        > _SIGMAS / math.sqrt(weights[first].size)
    ]
