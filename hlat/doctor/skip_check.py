"""Check that a step with non-finite gradients changes nothing."""

import math
from collections.abc import Iterator

import numpy as np

from hlat.doctor.check_result import CheckResult, FaultLocation, build_result
from hlat.doctor.engine_harness import EngineHarness
from hlat.doctor.sampled_inputs import sample_batch, sample_optimizer_state, sample_weights
from hlat.recovery.preflight_checks import format_first

_NUM_UPDATES = 1
_LEARNING_RATE = 2.0**-3
_NAME = "model.embed_tokens.weight"


def check_skipping(harness: EngineHarness) -> Iterator[CheckResult]:
    """Check that a NaN in a weight leaves all other weights and the moments bit-identical."""
    config, weights = harness.config, sample_weights(harness.config)
    tokens = sample_batch(config)
    weights[_NAME][tokens[0, 0], 0] = np.nan
    harness.set_optimizer_state(_NUM_UPDATES)
    harness.load_tensors({"weights": weights, **sample_optimizer_state(config)})
    before = harness.gather_state()
    metrics = harness.train_step(tokens, _LEARNING_RATE)
    after = harness.gather_state()
    if not harness.is_rank0:
        return
    changed = [
        f"{key}/{name}"
        for key, tensors in before.items()
        for name, values in tensors.items()
        if not np.array_equal(values, after[key][name], equal_nan=True)
    ]
    is_reported = not math.isfinite(metrics.grad_norm or 0.0)
    if not is_reported:
        changed.append("grad_norm")
    yield build_result(
        "skipping",
        [FaultLocation(part, "update") for part in changed],
        "a step with non-finite gradients changes no weight, moment or count",
        f"a step with non-finite gradients changes {format_first(changed)}"
        if is_reported
        else f"the norm of non-finite gradients is {metrics.grad_norm:.4g}",
    )
