"""Checks of loss and gradients of one step against a reference with the same weights.

The reference computes the exact gradients of each micro batch, and each sequence must count once in
their sum. The checks compare the loss, the gradient of each parameter, the counts of data-parallel
ranks and micro batches, and the global norm. See gradient_fault_location.py for the cause of a
wrong gradient, and clipping_check.py for a wrong factor of all gradients.
"""

import math
from collections.abc import Iterator

import numpy as np

from hlat.config.run import Config
from hlat.distributed.parameter_shards import count_kv_replicas
from hlat.doctor import clipping_check, tolerances
from hlat.doctor.check_result import (
    CheckResult,
    FaultLocation,
    build_result,
    format_parallel_axes,
    skip_check,
)
from hlat.doctor.engine_harness import EngineHarness
from hlat.doctor.gradient_errors import ExactGradients, compute_relative_errors, sum_gradients
from hlat.doctor.gradient_fault_location import (
    WrongGradient,
    compute_micro_batch_gradients,
    is_of_kv_heads,
    locate_wrong_gradients,
)
from hlat.doctor.sampled_inputs import FullTensors, sample_batch
from hlat.engine.interface import StepMetrics
from hlat.model.decoder_spec import list_parameter_specs
from hlat.recovery.preflight_checks import format_first


def check_gradients(harness: EngineHarness) -> Iterator[CheckResult]:
    """Check loss and gradients of a step against the reference with the same weights."""
    with harness.with_gradient_source() as other:
        yield from _check_gradients(other)


def _check_gradients(harness: EngineHarness) -> Iterator[CheckResult]:
    config = harness.config
    weights, tokens = harness.load_random_weights(), sample_batch(config)
    metrics, gradients = harness.step_with_gradients(tokens)
    exact, loss = harness.run_on_rank0(
        lambda: compute_micro_batch_gradients(config, weights, tokens)
    ) or ([], 0.0)
    factors = clipping_check.find_factors(config, metrics, gradients, sum_gradients(exact))
    gradients = {name: gradient / factors.get(name, 1) for name, gradient in gradients.items()}
    errors = locate_wrong_gradients(harness, gradients, exact)
    if not harness.is_rank0:
        return
    location = FaultLocation("loss", errors[0].axis if errors else format_parallel_axes(config))
    tolerance = tolerances.compute_loss_tolerance(config)
    yield _compare_scalar("loss", location, metrics.loss, loss, tolerance)
    yield _check_all_gradients(config, gradients, exact, errors)
    yield _check_contributions(config, errors, "reduction", "dp")
    yield _check_contributions(config, errors, "pipeline", "pp")
    yield _check_gradient_norm(config, metrics, gradients)
    yield clipping_check.check_clipping(config, metrics, factors)


def _check_all_gradients(
    config: Config,
    gradients: FullTensors,
    exact: list[ExactGradients],
    errors: list[WrongGradient],
) -> CheckResult:
    tolerance = tolerances.compute_gradient_tolerance(config)
    largest = max(compute_relative_errors(gradients, sum_gradients(exact)).values())
    return build_result(
        "gradients",
        [FaultLocation(error.name, error.axis) for error in errors],
        f"all {len(gradients)} have a relative error of at most {largest:.1e}",
        f"{_format_errors(errors)} (tolerance {tolerance:.1e})",
        largest=largest,
        tolerance=tolerance,
    )


def _check_contributions(
    config: Config, errors: list[WrongGradient], check: str, axis: str
) -> CheckResult:
    """Check the counts of the ranks along an axis."""
    size = {"dp": config.parallelism.dp or 1, "pp": config.parallelism.pp}[axis]
    if size == 1:
        return skip_check(check, f"parallelism.{axis} is 1")
    errors = [error for error in errors if error.axis == axis]
    passed = {
        "dp": f"each sequence of {size} data-parallel ranks counts once",
        "pp": f"each of {config.num_micro_batches} micro batches passes {size} stages once",
    }
    faults = [FaultLocation(error.name, axis) for error in errors]
    return build_result(check, faults, passed[axis], _format_errors(errors))


def _format_errors(errors: list[WrongGradient]) -> str:
    messages = [
        f"{one.name} has a relative error of {one.error:.1e} along {one.axis}{one.counts}"
        for one in errors
    ]
    return format_first(messages, separator="; ")


def _check_gradient_norm(
    config: Config, metrics: StepMetrics, gradients: FullTensors
) -> CheckResult:
    """Check the global norm against that of the gathered gradients."""
    squares = {
        name: float(np.square(gradient.astype(np.float64)).sum())
        for name, gradient in gradients.items()
    }
    measured, expected = metrics.grad_norm, float(np.sqrt(sum(squares.values())))
    assert measured is not None
    location = FaultLocation("grad_norm", _find_double_counted_axis(config, squares, measured))
    tolerance = tolerances.compute_norm_tolerance(config)
    hint = ": some elements are counted more than once or not at all"
    return _compare_scalar("gradient norm", location, measured, expected, tolerance, hint)


def _find_double_counted_axis(config: Config, squares: dict[str, float], measured: float) -> str:
    """Return the axis whose double count explains the norm, else all parallel axes."""
    layout, total = config.parallelism, sum(squares.values())
    num_replicas = count_kv_replicas(config.model, layout.tp)
    specs = list_parameter_specs(config.model)
    replicated = sum(squares[spec.name] for spec in specs if spec.sharding.is_replicated)
    kv = sum(squares[spec.name] for spec in specs if is_of_kv_heads(spec))
    candidates = {
        "kv": total + (num_replicas - 1) * kv,
        "tp": total + (layout.tp - 1) * replicated,
        "dp": total * (layout.dp or 1),
        "pp": total * layout.pp,
    }
    for axis, square in candidates.items():
        if square > total and abs(square - measured**2) < 0.01 * measured**2:
            return axis
    return format_parallel_axes(config)


def _compare_scalar(
    check: str,
    location: FaultLocation,
    measured: float,
    expected: float,
    tolerance: float,
    hint: str = "",
) -> CheckResult:
    """Compare a measured value with the expected one."""
    gap = abs(measured - expected) / expected if expected else math.inf
    values, ratio = f"{measured:.7g}, expected {expected:.7g}", measured / (expected or math.nan)
    return build_result(
        check,
        [] if gap <= tolerance else [location],
        values,
        f"{values}: ratio {ratio:.4g}, relative error {gap:.1e} (tolerance "
        f"{tolerance:.1e}) along {location.axis}{hint}",
        **{location.part: measured, "expected": expected, "tolerance": tolerance},
    )
