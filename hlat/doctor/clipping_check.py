"""Check of the factor between gradients and optimizer state: clipping, and 1 - beta1 for moments.

If the engine reports the exact gradient norm, and each first moment is a multiple of the exact
gradient, then the gradients are right, and another factor is a fault of clipping or of the first
moment.
"""

from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlat.config.run import Config
from hlat.doctor import tolerances
from hlat.doctor.check_result import CheckResult, FaultLocation, build_result, skip_check
from hlat.doctor.engine_harness import compute_clip_factor
from hlat.doctor.gradient_errors import ExactGradients, compute_relative_errors, get_weight_name
from hlat.doctor.sampled_inputs import FullTensors
from hlat.engine.interface import StepMetrics
from hlat.model.parameter_spec import ParameterRole
from hlat.optim.optimizer_spec import get_optimizer_spec
from hlat.recovery.preflight_checks import format_first


def find_factors(
    config: Config, metrics: StepMetrics, gradients: FullTensors, exact: ExactGradients
) -> dict[str, float]:
    """Return the factor of each gradient that was computed from a first moment.

    Empty if the factors are one, or if the gradients themselves are wrong.
    """
    assert metrics.grad_norm is not None
    tolerance = tolerances.compute_gradient_tolerance(config)
    norm_tolerance = tolerance + tolerances.compute_norm_tolerance(config)
    norm = np.sqrt(sum(np.square(gradient).sum() for gradient in exact.values()))
    if not exact or not abs(metrics.grad_norm - norm) <= norm * norm_tolerance:
        return {}
    slopes = {name: _compute_slope(gradients[name], exact[name]) for name in exact}
    # The exact gradient of a bias may be zero
    factors = {name: slopes.get(get_weight_name(name), slopes[name]) for name in exact}
    scaled = {name: factors[name] * gradient for name, gradient in exact.items()}
    errors = compute_relative_errors(gradients, scaled).values()
    is_scaled = all(error <= tolerance for error in errors)
    # The gradient of a single element has a larger error
    is_one = all(
        abs(factor - 1) <= tolerance for name, factor in factors.items() if exact[name].size > 1
    )
    return factors if is_scaled and not is_one else {}


def _compute_slope(measured: NDArray[Any], exact: NDArray[np.float64]) -> float:
    """Return the factor of the exact gradient nearest to the measured one; one for zero."""
    square = np.square(exact).sum()
    return float((measured * exact).sum() / square) if square else 1.0


def check_clipping(config: Config, metrics: StepMetrics, factors: dict[str, float]) -> CheckResult:
    """Check that the first moments are those of gradients clipped by their global norm."""
    clip_factor = compute_clip_factor(config, metrics)
    if not factors and clip_factor == 1:
        reason = f"gradients of norm {metrics.grad_norm:.4g} are not clipped"
        return skip_check(
            "clipping", f"{reason} at optimizer.grad_clip={config.optimizer.grad_clip}"
        )
    parts, cause = _find_cause(config, clip_factor, [*factors.values()]) if factors else ([], "")
    shown = format_first([f"{value:g}" for value in sorted({*np.round([*factors.values()], 2)})])
    return build_result(
        "clipping",
        [FaultLocation(part, "update") for part in parts],
        f"the gradients of norm {metrics.grad_norm:.4g} are scaled by {clip_factor:.4g}",
        f"the gradients are right, but the first moments are {shown} times those of gradients "
        f"scaled by {clip_factor:.4g}: {cause}",
        clip_factor=clip_factor,
    )


def _find_cause(config: Config, clip_factor: float, factors: list[float]) -> tuple[list[str], str]:
    """Return the settings that are not applied, and a description."""
    tolerance = tolerances.compute_gradient_tolerance(config) + 1e-3
    causes = {1 / clip_factor: (["optimizer.grad_clip"], "they are not clipped")}
    optimizer = get_optimizer_spec(config.optimizer.name)
    gradient_source = optimizer.get_gradient_source(config.optimizer, ParameterRole.matrix)
    assert gradient_source is not None
    source, expected = gradient_source
    decays = {one.name: one.decay for one in optimizer.list_state_tensors(ParameterRole.matrix)}
    right = decays.pop(source)
    assert right is not None
    for decay in filter(None, decays.values()):
        factor = (1 - attrgetter(decay)(config.optimizer)) / expected
        causes[factor] = [f"optimizer.{right}"], f"{decay} takes the place of {right}"
    both = ["optimizer.grad_clip", f"optimizer.{right}"]
    causes[factors[0]] = both, f"clipping or {right} is wrong"
    for factor, cause in causes.items():
        if np.allclose(factors, factor, rtol=tolerance, atol=0):
            return cause
    return ["optimizer.grad_clip"], "they are not clipped by their global norm"
