"""Check of the copy of the master weights that the model reads, by its effect on the loss.

Each master weight is moved by a part of the spacing of bf16 in the direction that lowers the loss.
Rounding to nearest undoes all of these moves; stochastic rounding applies them on average, with
other random bits in each step.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hlat.config.precision import Dtype, RoundingMode
from hlat.config.run import Config
from hlat.doctor import reference_model
from hlat.doctor.check_result import CheckResult, FaultLocation, build_result, skip_check
from hlat.doctor.engine_harness import EngineHarness
from hlat.doctor.rounding_statistics import compute_spacing
from hlat.doctor.sampled_inputs import FullTensors, sample_batch, sample_weights

_SHIFT = 0.375
"""Part of the spacing of bf16; less than half, so that rounding to nearest undoes it."""
_NUM_STEPS = 8
_TOLERANCE = 0.5
"""Maximum error of the share, from bf16 in the forward pass."""


def check_master_copy(harness: EngineHarness) -> Iterator[CheckResult]:
    """Check that the recipe rounds master weights to the weights that the model reads."""
    config, precision = harness.config, harness.config.precision
    if precision.master_weight_dtype is not Dtype.fp32 or precision.param_dtype is not Dtype.bf16:
        yield skip_check("master copy", f"precision={precision.name} has no copy in bf16")
        return
    weights, tokens = sample_weights(config), sample_batch(config)
    shifted = _lower_loss(config, weights, tokens)
    documents = np.zeros_like(tokens)
    harness.load_random_weights()
    unshifted_loss = harness.evaluate(tokens, documents)
    losses = []
    for step in range(_NUM_STEPS):
        harness.set_optimizer_state(step)
        harness.load_weights(shifted)
        losses.append(harness.evaluate(tokens, documents))
    if harness.is_rank0:
        expected, exact = (
            reference_model.compute_mean_loss(config.model, one, tokens)
            for one in (weights, shifted)
        )
        changes = np.subtract(losses, unshifted_loss) / (exact - expected)
        yield _build_result(config, changes)


def _lower_loss(config: Config, weights: FullTensors, tokens: NDArray[np.int32]) -> FullTensors:
    """Return values between those of bf16 that lower the loss."""
    _, gradients = reference_model.compute_gradients(config.model, weights, tokens, tokens.size)
    shifted = {}
    for name, weight in weights.items():
        # A power of two has a neighbor at half of its spacing
        spacing = compute_spacing(weight.astype(np.float64) * (1 - 2.0**-10))
        shifted[name] = weight - (_SHIFT * np.sign(gradients[name]) * spacing).astype(np.float32)
    return shifted


def _build_result(config: Config, changes: NDArray[np.float64]) -> CheckResult:
    """Return the result, given the changes of the loss relative to the exact one."""
    share, num_different = float(changes.mean()), len({*changes.tolist()})
    is_stochastic = config.precision.rounding is RoundingMode.stochastic
    if not is_stochastic:
        is_correct = not changes.any()
        subject = "changes of master weights below half the spacing of bf16"
        message = f"{subject} do not reach the model, as expected from rounding to nearest"
        failed = f"{subject} reach the model by {share:.0%}; expected rounding to nearest"
        fault = "rounding to nearest"
    else:
        is_correct = abs(share - 1) <= _TOLERANCE and num_different == len(changes)
        message = (
            f"{share:.0%} of small changes of master weights reach the model, with other random "
            "bits in each step"
        )
        failed = (
            f"{share:.0%} of small changes of master weights reach the model (tolerance "
            f"{_TOLERANCE:.0%}), with {num_different} results in {len(changes)} steps"
        )
        fault = "stochastic rounding"
    faults = [] if is_correct else [FaultLocation(f"{fault} of the copy", "rounding")]
    return build_result("master copy", faults, message, failed, share=share)
