"""Checks of loss and gradients against a reference, with each sequence counted once.

The gradient of a batch is the sum of those of its micro batches, which the reference computes
separately. For a wrong gradient, least squares gives the count of each micro batch of each
data-parallel rank in it. If no such sum explains the gradient, the check searches for the axis
without which it is correct.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlat.config.run import Config
from hlat.distributed.parameter_shards import count_kv_replicas
from hlat.doctor import clipping_check, reference_model, tolerances
from hlat.doctor.check_result import CheckResult, FaultLocation, build_result, skip_check
from hlat.doctor.engine_harness import (
    EngineHarness,
    FullTensors,
    build_masks,
    sample_batch,
    sample_documents,
)
from hlat.doctor.gradient_errors import (
    ExactGradients,
    compute_relative_error,
    compute_relative_errors,
    sum_gradients,
)
from hlat.doctor.reduced_config import move_axis_to_dp, to_single_process
from hlat.engine.interface import StepMetrics
from hlat.model.decoder_spec import list_parameter_specs
from hlat.model.parameter_spec import ParameterSpec
from hlat.recovery.preflight_checks import format_first

_COUNT_TOLERANCE = 0.1
"""Maximum difference between equal counts, from rounding."""


@dataclass
class _GradientError:
    """Wrong gradient of a parameter.

    `error` is the norm of the error, relative to the norm of the exact gradient. `axis` is empty
    while unknown. `counts` describes those of each micro batch; empty if no sum explains the error.
    """

    name: str
    error: float
    axis: str
    counts: str


def check_gradients(harness: EngineHarness) -> Iterator[CheckResult]:
    """Check loss and gradients of a step against the reference with the same weights."""
    config = harness.config
    weights, tokens = harness.load_random_weights(), sample_batch(config)
    metrics, gradients = harness.step_with_gradients(tokens)
    exact, loss = harness.run_on_rank0(
        lambda: _compute_micro_batch_gradients(config, weights, tokens)
    ) or ([], 0.0)
    factors = clipping_check.find_factors(config, metrics, gradients, sum_gradients(exact))
    gradients = {name: gradient / factors.get(name, 1) for name, gradient in gradients.items()}
    errors: list[_GradientError] = (
        harness.run_on_rank0(lambda: _find_wrong_gradients(config, gradients, exact)) or []
    )
    unknown = harness.broadcast_object([error.name for error in errors if not error.axis])
    axes = _find_axes(harness, unknown)
    if not harness.is_rank0:
        return
    for error in errors:
        error.axis = error.axis or axes[error.name]
    location = FaultLocation("loss", errors[0].axis if errors else format_parallel_axes(config))
    tolerance = tolerances.compute_loss_tolerance(config)
    yield _compare_scalar("loss", location, metrics.loss, loss, tolerance)
    yield _check_all_gradients(config, gradients, exact, errors)
    yield _check_contributions(config, errors, "reduction", "dp")
    yield _check_contributions(config, errors, "pipeline", "pp")
    yield _check_gradient_norm(config, metrics, gradients)
    yield clipping_check.check_clipping(config, metrics, factors)


def check_next_step(harness: EngineHarness) -> Iterator[CheckResult]:
    """Check that the forward pass uses the updated weights on every rank."""
    config = harness.config
    tokens = sample_batch(config, 3)
    harness.load_random_weights()
    harness.train_step(tokens, 2.0**-6)
    metrics = harness.train_step(tokens, 0.0)
    weights = harness.gather_full_tensors("weights")
    if not harness.is_rank0:
        return
    masks = build_masks(config, sample_documents(config, tokens))
    loss = reference_model.compute_mean_loss(config.model, weights, tokens, masks)
    norm = float(np.sqrt(sum(np.square(w.astype(np.float64)).sum() for w in weights.values())))
    tolerance = 2 * tolerances.compute_loss_tolerance(config)
    loss_gap = abs(metrics.loss - loss) / loss
    assert metrics.param_norm is not None
    norm_gap = abs(metrics.param_norm - norm) / norm
    faults, axes = [], format_parallel_axes(config)
    if not loss_gap <= tolerance:
        faults.append(FaultLocation("weights that the model reads", axes))
    if not norm_gap <= tolerances.compute_norm_tolerance(config):
        faults.append(FaultLocation("param_norm", axes))
    yield build_result(
        "next step",
        faults,
        f"the loss after an update is that of the updated weights to {loss_gap:.1e}",
        f"the loss after an update is {metrics.loss:.5f}, and {loss:.5f} with the updated "
        f"weights; param_norm is {metrics.param_norm:.5f}, expected {norm:.5f}",
        loss_gap=loss_gap,
        norm_gap=norm_gap,
        tolerance=tolerance,
    )


def _compute_micro_batch_gradients(
    config: Config, weights: FullTensors, tokens: NDArray[np.int32]
) -> tuple[list[ExactGradients], float]:
    """Return the exact gradients per data-parallel rank and micro batch, and the total loss."""
    dp, masks = config.parallelism.dp or 1, build_masks(config, sample_documents(config, tokens))
    num_targets = reference_model.count_targets(tokens, masks)
    results = [
        reference_model.compute_gradients(
            config.model, weights, tokens[rows], num_targets, masks.select_rows(rows)
        )
        for rank in range(dp)
        for rows in np.split(np.arange(rank, len(tokens), dp), config.num_micro_batches)
    ]
    return [gradients for _, gradients in results], sum(loss for loss, _ in results)


def _find_wrong_gradients(
    config: Config, gradients: FullTensors, exact: list[ExactGradients]
) -> list[_GradientError]:
    """Return the wrong gradients, the worst first, with their axis if the counts show it."""
    tolerance, errors = tolerances.compute_gradient_tolerance(config), []
    for name, error in compute_relative_errors(gradients, sum_gradients(exact)).items():
        if error <= tolerance:
            continue
        basis = np.stack([part[name].ravel() for part in exact], axis=1)
        flat = gradients[name].ravel()
        counts, *_ = np.linalg.lstsq(basis, np.nan_to_num(flat.astype(np.float64)))
        residual = compute_relative_error(flat, basis @ counts)
        is_sum = residual <= tolerance * max(1, counts.max())
        axis, description = _explain_counts(config, counts) if is_sum else ("", "")
        errors.append(_GradientError(name, error, axis, description))
    return sorted(errors, key=lambda error: -error.error)


def _explain_counts(config: Config, counts: NDArray[Any]) -> tuple[str, str]:
    """Return the axis along which counts differ, empty if all are equal, and their description."""
    table = counts.reshape(-1, config.num_micro_batches)
    axis, subject, shown = "", "every sequence counts", table.mean(keepdims=True)[0]
    if np.ptp(table.mean(1)) > _COUNT_TOLERANCE:
        axis, subject, shown = "dp", "sequences of data-parallel ranks count", table.mean(1)
    elif np.ptp(table.mean(0)) > _COUNT_TOLERANCE:
        axis = "pp" if config.parallelism.pp > 1 else "accumulation"
        subject, shown = "micro batches count", table.mean(0)
    return axis, f": {subject} {', '.join(f'{abs(n):.3g}' for n in shown.round(2))} times"


def _find_axes(harness: EngineHarness, names: list[str]) -> dict[str, str]:
    """Return for each wrong gradient the axis without which it is correct; model: without any.

    The axis is "compiler" if the gradient is correct without compilation.
    """
    config = harness.config
    if not names or not config.compiler.torch_compile:
        return _find_parallel_axes(harness, config, names)
    eager = replace(config, compiler=replace(config.compiler, torch_compile=False))
    wrong = find_wrong_names(harness, eager)
    axes = {name: "compiler" for name in names if name not in wrong}
    return axes | _find_parallel_axes(harness, eager, [name for name in names if name in wrong])


def _find_parallel_axes(harness: EngineHarness, config: Config, names: list[str]) -> dict[str, str]:
    """Return the axis of the layout for each gradient that is wrong with a configuration."""
    if not names:
        return {}
    layout = config.parallelism
    if config.num_processes == 1:
        return dict.fromkeys(names, "model")
    model_axes = [axis for axis in ("tp", "pp") if getattr(layout, axis) > 1]
    if not harness.can_rebuild:
        return dict.fromkeys(names, "+".join([*model_axes, "dp"]))
    wrong = find_wrong_names(harness, to_single_process(config))
    axes = {name: "model" for name in names if name in wrong}
    for axis in model_axes:
        wrong = find_wrong_names(harness, move_axis_to_dp(config, axis))
        axes |= {name: axis for name in names if name not in axes and name not in wrong}
    axes = {name: axes.get(name, "dp") for name in names}
    if layout.sequence_parallel and "tp" in axes.values():
        without_sp = replace(config, parallelism=replace(layout, sequence_parallel=False))
        wrong = find_wrong_names(harness, without_sp)
        axes |= {n: "sp" for n, axis in axes.items() if axis == "tp" and n not in wrong}
    if count_kv_replicas(config.model, layout.tp) > 1:
        kv_names = [name for name in axes if _is_of_kv_heads(harness.parameters[name])]
        axes |= {name: "kv" for name in kv_names if axes[name] == "tp"}
    return axes


def find_wrong_names(harness: EngineHarness, config: Config) -> set[str]:
    """Return on all ranks the names of gradients that are wrong with another configuration."""
    tokens = sample_batch(config)
    with harness.with_config(config) as other:
        weights = other.load_random_weights()
        _, gradients = other.step_with_gradients(tokens)

        def find_wrong_names() -> list[str]:
            exact, _ = _compute_micro_batch_gradients(config, weights, tokens)
            return [error.name for error in _find_wrong_gradients(config, gradients, exact)]

        return set(other.broadcast_object(other.run_on_rank0(find_wrong_names)))


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


def _check_all_gradients(
    config: Config,
    gradients: FullTensors,
    exact: list[ExactGradients],
    errors: list[_GradientError],
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
    config: Config, errors: list[_GradientError], check: str, axis: str
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


def _format_errors(errors: list[_GradientError]) -> str:
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
    kv = sum(squares[spec.name] for spec in specs if _is_of_kv_heads(spec))
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


def _is_of_kv_heads(spec: ParameterSpec) -> bool:
    """Return True for a parameter of key/value heads, which ranks share if there are few heads."""
    is_kv = spec.name.split(".")[-2] in ("k_proj", "v_proj", "k_norm")
    return is_kv and not spec.sharding.is_replicated


def format_parallel_axes(config: Config) -> str:
    """Return the axes with several ranks as "tp+pp+dp", or "model" if there are none."""
    layout = config.parallelism
    sizes = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp or 1}
    return "+".join(axis for axis, size in sizes.items() if size > 1) or "model"
