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
    harness.load_random_weights()
    tokens, samples = sample_batch(harness.config), []
    before = harness.gather_full_tensors("weights")
    for _ in range(_NUM_STEPS):
        harness.train_step(tokens, _LEARNING_RATE)
        after = harness.gather_state()
        for name, weight in before.items():
            # Norm weights are close to one, where such an update rarely changes the value
            if weight.ndim > 1:
                state = {key: tensors[name].astype(np.float64) for key, tensors in after.items()}
                samples.append(
                    _select_small_updates(harness.config, weight.astype(np.float64), state)
                )
        before = after["weights"]
    if harness.is_rank0:
        yield _build_rounding_result(harness.config, np.concatenate(samples, axis=1))


def _select_small_updates(config: Config, before: Array, after: dict[str, Array]) -> Array:
    """Return weights, exact updates, applied updates and spacings of small updates, [4, n].

    The exact update follows from the stored moments (arXiv 1711.05101, algorithm 2).
    """
    settings, count = config.optimizer, float(after["updates"])
    ratio = (after["exp_avg"] / (1 - settings.beta1**count)) / (
        np.sqrt(after["exp_avg_sq"] / (1 - settings.beta2**count)) + settings.eps
    )
    requested = -_LEARNING_RATE * (ratio + settings.weight_decay * before)
    is_bf16 = _get_update_dtype(config) is Dtype.bf16
    magnitude = np.maximum(np.abs(before), 1e-30)
    spacing = np.exp2(np.floor(np.log2(magnitude)) - (7 if is_bf16 else 23))
    values = np.stack([before, requested, after["weights"] - before, spacing])
    small = np.abs(requested) < spacing / 2 if is_bf16 else np.full(before.shape, True)
    return values[:, small]


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
