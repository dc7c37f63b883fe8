"""Check that small weight updates are applied on average, without a drift.

An update below half the spacing of bf16 is lost by rounding to nearest and applied on average by
stochastic rounding. The exact update is computed from the stored moments.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hlat.config.precision import Dtype, RoundingMode
from hlat.config.run import Config
from hlat.doctor.check_result import CheckResult, FaultLocation, build_result
from hlat.doctor.engine_harness import EngineHarness, sample_batch

_NUM_STEPS = 6
_LEARNING_RATE = 2.0**-14
"""A sixteenth of the spacing of bf16 at 1/8, the magnitude of most weights."""
_SIGMAS = 6
_TOLERANCE = 0.01
"""Tolerance for the rounding of the moments."""

Array = NDArray[np.float64]


def check_rounding(harness: EngineHarness) -> Iterator[CheckResult]:
    """Check the fraction of small updates that is applied, and the drift of the weights."""
    config = harness.config
    harness.load_random_weights()
    tokens, samples = sample_batch(config), []
    before = harness.gather_full_tensors("weights")
    for _ in range(_NUM_STEPS):
        harness.train_step(tokens, _LEARNING_RATE)
        after = harness.gather_full_tensors("weights")
        moments = [harness.gather_full_tensors(key) for key in ("exp_avg", "exp_avg_sq", "updates")]
        # Norm weights are close to one, where such an update rarely changes the value
        for name in (name for name, weight in before.items() if weight.ndim > 1):
            tensors = (tensors[name].astype(np.float64) for tensors in (before, after, *moments))
            samples.append(_select_small_updates(config, *tensors))
        before = after
    if harness.is_rank0:
        yield _build_rounding_result(config, np.concatenate(samples, axis=1))


def _select_small_updates(
    config: Config, before: Array, after: Array, exp_avg: Array, exp_avg_sq: Array, count: Array
) -> Array:
    """Return weights, exact updates, applied updates and spacings of small updates, [4, n]."""
    requested = _compute_requested_update(config, before, exp_avg, exp_avg_sq, count)
    spacing = _compute_spacing(config, before)
    values = np.stack([before, requested, after - before, spacing])
    is_bf16 = _get_update_dtype(config) is Dtype.bf16
    small = np.abs(requested) < spacing / 2 if is_bf16 else np.full(before.shape, True)
    return values[:, small]


def _compute_requested_update(
    config: Config, weight: Array, exp_avg: Array, exp_avg_sq: Array, num_updates: Array
) -> Array:
    """Return the exact update from the stored moments (arXiv 1711.05101, algorithm 2)."""
    settings, count = config.optimizer, float(num_updates)
    ratio = (exp_avg / (1 - settings.beta1**count)) / (
        np.sqrt(exp_avg_sq / (1 - settings.beta2**count)) + settings.eps
    )
    update: Array = -_LEARNING_RATE * (ratio + settings.weight_decay * weight)
    return update


def _compute_spacing(config: Config, weight: Array) -> Array:
    """Return the spacing of the weights' dtype at each weight."""
    mantissa_bits = 23 if _get_update_dtype(config) is Dtype.fp32 else 7
    magnitude = np.maximum(np.abs(weight), 1e-30)
    spacing: Array = np.exp2(np.floor(np.log2(magnitude)) - mantissa_bits)
    return spacing


def _get_update_dtype(config: Config) -> Dtype:
    return config.precision.master_weights or config.precision.weights


def _build_rounding_result(config: Config, samples: Array) -> CheckResult:
    weight, requested, change, spacing = samples
    fraction = np.minimum(np.abs(requested) / spacing, 1)
    variance, total = fraction * (1 - fraction), (requested**2).sum()
    applied = float((change * requested).sum() / total)
    applied_std = np.sqrt((requested**2 * spacing**2 * variance).sum()) / total
    tolerance = _SIGMAS * float(applied_std) + _TOLERANCE
    error = (change - requested) / spacing
    drift = max(abs(float((error * np.sign(weight)).mean())), abs(float(error.mean())))
    max_drift = _SIGMAS * float(np.sqrt(variance.sum())) / weight.size + 1e-3
    numbers = {"kept": applied, "tolerance": tolerance}
    numbers |= {"drift": drift, "drift_tolerance": max_drift}
    is_bf16 = _get_update_dtype(config) is Dtype.bf16
    if is_bf16 and config.precision.rounding is RoundingMode.nearest:
        message = (
            f"{applied:.1%} of small updates are applied: precision={config.precision.name} rounds "
            "bf16 to nearest and loses the others, as expected; bf16_sr and mixed apply them"
        )
        return build_result("rounding", [], message, message, **numbers)
    faults = []
    if not abs(applied - 1) <= tolerance:
        faults.append(FaultLocation("share of small updates that arrives", "rounding"))
    if is_bf16 and not drift <= max_drift:
        faults.append(FaultLocation("drift of the weights", "rounding"))
    return build_result(
        "rounding",
        faults,
        f"{applied:.1%} of small updates are applied (tolerance {tolerance:.1%})"
        + (f"; weights drift by {drift:.1e} spacings per step" if is_bf16 else ""),
        f"{applied:.1%} of small updates are applied (expected 100%, tolerance {tolerance:.1%}); "
        f"weights drift by {drift:.1e} spacings per step (tolerance {max_drift:.1e})",
        **numbers,
    )
