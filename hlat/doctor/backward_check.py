"""Check of the backward pass of extensions against finite differences."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hlat.doctor import reference_model
from hlat.doctor.check_result import CheckResult, FaultLocation, build_result, skip_check
from hlat.doctor.engine_harness import EngineHarness
from hlat.doctor.extension_reference import list_extended_sections
from hlat.doctor.sampled_inputs import sample_batch, sample_weights
from hlat.recovery.preflight_checks import format_first

_STEP = 1e-5
"""Step of the central difference; its error is of the order of the square."""
_TOLERANCE = 1e-5
"""Maximum error of a directional derivative, relative to the norm of the gradient."""
_SMALL_GRADIENT = 1e-4
"""Smallest norm, relative to that of all gradients, to which an error is relative: differences of
losses have rounding errors."""


def check_backward(harness: EngineHarness) -> Iterator[CheckResult]:
    """Compare the gradient of each parameter with a central difference in a random direction.

    The component of an extension and its gradient are computed in fp64 on one process.
    """
    sections = list_extended_sections(harness.config.model)
    if not sections:
        yield skip_check("backward", "no component of the model is that of an extension")
        return
    errors = harness.run_on_rank0(lambda: _compute_errors(harness))
    if errors is None:
        return
    # The parameters before a fault in the forward pass are wrong, so the last of them is next to it
    wrong = [name for name, error in reversed(errors.items()) if not error <= _TOLERANCE]
    messages = [f"{name} by {errors[name]:.1e}" for name in wrong]
    largest = max(errors.values())
    yield build_result(
        "backward",
        [FaultLocation(name, "model") for name in wrong],
        f"gradients with {', '.join(sections)} are finite differences to {largest:.1e}",
        f"the backward pass with {', '.join(sections)} differs from finite differences "
        f"(tolerance {_TOLERANCE:.0e}): {format_first(messages, separator='; ')}",
        largest=largest,
        tolerance=_TOLERANCE,
    )


def _compute_errors(harness: EngineHarness) -> dict[str, float]:
    """Return the error of the derivative along a random direction by parameter."""
    model, tokens = harness.config.model, sample_batch(harness.config)[:1]
    sampled = sample_weights(harness.config)
    weights: Mapping[str, NDArray[Any]] = {
        name: value.astype(np.float64) for name, value in sampled.items()
    }
    num_targets = reference_model.count_targets(tokens, reference_model.NO_MASKS)
    _, gradients = reference_model.compute_gradients(model, weights, tokens, num_targets)

    def compute_objective(changed: Mapping[str, NDArray[Any]]) -> float:
        leaves = {name: torch.from_numpy(value) for name, value in changed.items()}
        _, objective = reference_model.compute_loss_sums(model, leaves, tokens)
        return float(objective) / num_targets

    norms = {name: float(np.linalg.norm(gradient)) for name, gradient in gradients.items()}
    floor = _SMALL_GRADIENT * float(np.linalg.norm([*norms.values()]))
    errors = {}
    for number, (name, gradient) in enumerate(gradients.items()):
        direction = np.random.default_rng(number).standard_normal(gradient.shape)
        direction /= np.linalg.norm(direction)
        ahead, behind = (
            compute_objective({**weights, name: weights[name] + sign * _STEP * direction})
            for sign in (1, -1)
        )
        difference = (ahead - behind) / (2 * _STEP) - float((gradient * direction).sum())
        errors[name] = abs(difference) / max(norms[name], floor)
    return errors
