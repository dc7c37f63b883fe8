"""Check of the rounding of weights and optimizer state in updates that are known exactly.

A step without gradients is repeated from the same state with other numbers of updates. An update
below half the spacing of bf16 is lost by rounding to nearest; stochastic rounding applies it on
average, with random bits that are independent between steps, tensors, rows and columns.
"""

from collections.abc import Iterator
from operator import attrgetter

import numpy as np

from hlat.config.precision import Dtype, RoundingMode
from hlat.config.run import Config
from hlat.doctor.check_result import CheckResult, FaultLocation, build_result, skip_check
from hlat.doctor.engine_harness import EngineHarness
from hlat.doctor.extension_reference import build_reference_update
from hlat.doctor.reference_optimizer import (
    ReferenceState,
    build_states,
    find_reference_update,
    format_missing_reference,
)
from hlat.doctor.reference_parametrization import adapt_update
from hlat.doctor.reference_updates import update_states
from hlat.doctor.rounding_statistics import (
    Array,
    compute_mean,
    compute_residuals,
    compute_spacing,
    sum_pairs,
)
from hlat.doctor.sampled_inputs import (
    FullTensors,
    StateTensors,
    remove_gradients,
    sample_batch,
    sample_optimizer_state,
    sample_weights,
)
from hlat.model.parameter_spec import ParameterRole
from hlat.optim.optimizer_spec import get_optimizer_spec

_NUM_STEPS = 6
_FIRST_UPDATE = 1000
_LEARNING_RATE = 2.0**-13
"""An eighth of the spacing of bf16 at 1/8, the magnitude of most weights."""
_SIGMAS = 6
_TOLERANCE = 0.01
"""Tolerance for the rounding of the arithmetic."""
_AXES = ("weights and moments", "steps", "parameters", "rows", "columns")
"""Axes of the residuals of matrices of one shape."""

States = list[dict[str, ReferenceState]]
"""States by name after each step."""


def check_rounding(harness: EngineHarness) -> Iterator[CheckResult]:
    """Check the fraction of small updates that is applied, drift, and independence of rounding."""
    with harness.without_router_losses() as other:
        yield from _check_rounding(other)


def _check_rounding(harness: EngineHarness) -> Iterator[CheckResult]:
    config, tokens = harness.config, sample_batch(harness.config)
    settings, decay = config.optimizer, _find_gradient_decay(config)
    reference = find_reference_update(settings) or build_reference_update(config)
    if reference is None:
        yield skip_check("rounding", format_missing_reference(config.optimizer))
        return
    if (decay is None or attrgetter(decay)(settings) == 0) and settings.weight_decay == 0:
        reason = f"optimizer.{decay or 'weight_decay'} and optimizer.weight_decay are 0"
        yield skip_check("rounding", f"a step without gradients changes no weight: {reason}")
        return
    update = adapt_update(config, reference)
    before = {"weights": remove_gradients(config, sample_weights(config))}
    before |= sample_optimizer_state(config) | _sample_copies(config, before["weights"])
    exact: States = []
    stored: States = []
    for step in range(_NUM_STEPS if _has_stochastic_rounding(config) else 1):
        num_updates = _FIRST_UPDATE + step
        harness.set_optimizer_state(num_updates)
        harness.load_tensors(before)
        harness.train_step(tokens, _LEARNING_RATE)
        after = {key: harness.gather_full_tensors(key) for key in before}
        stored.append(build_states(after, num_updates + 1))
        states = build_states(before, num_updates)
        exact.append(update_states(config, update, states, None, _LEARNING_RATE))
    if harness.is_rank0:
        yield _build_result(config, build_states(before, 0), exact, stored)


def _find_gradient_decay(config: Config) -> str | None:
    """Return the setting that is the decay of the averaged gradient; None: there is no average."""
    optimizer = get_optimizer_spec(config.optimizer.name)
    source = optimizer.get_gradient_source(config.optimizer, ParameterRole.matrix)
    tensors = optimizer.list_state_tensors(ParameterRole.matrix)
    return next(
        (one.decay for one in tensors if source is not None and one.name == source[0]), None
    )


def _sample_copies(config: Config, weights: FullTensors) -> StateTensors:
    """Return state tensors near the weights, so that updates of the weights are small."""
    generator = np.random.default_rng(config.run.seed)
    tensors = get_optimizer_spec(config.optimizer.name).list_state_tensors(ParameterRole.matrix)
    return {
        tensor.name: {
            name: values
            + np.float32(_LEARNING_RATE * (tensor.dtype is Dtype.fp32))
            * generator.standard_normal(values.shape, np.float32)
            for name, values in weights.items()
        }
        for tensor in tensors
        if tensor.is_weights
    }


def _has_stochastic_rounding(config: Config) -> bool:
    return config.precision.rounding is RoundingMode.stochastic


def _build_result(
    config: Config, before: dict[str, ReferenceState], exact: States, stored: States
) -> CheckResult:
    applied, tolerance = _measure_applied(config, before, exact, stored)
    numbers = {"kept": applied, "tolerance": tolerance}
    is_bf16 = _get_update_dtype(config) is Dtype.bf16
    if is_bf16 and not _has_stochastic_rounding(config):
        message = (
            f"{applied:.1%} of small updates are applied: precision={config.precision.name} rounds "
            "bf16 to nearest and loses the others, as expected; bf16_sr and mixed apply them"
        )
        return build_result("rounding", [], message, message, **numbers)
    problems = {}
    if not abs(applied - 1) <= tolerance:
        part = "share of small updates that arrives"
        problems[part] = f"{applied:.1%} of small updates are applied (tolerance {tolerance:.1%})"
    keys = _list_rounded_keys(config)
    problems |= _find_drifts(keys, exact, stored)
    if keys:
        problems |= _find_dependence(keys, exact, stored)
    return build_result(
        "rounding",
        [FaultLocation(part, "rounding") for part in problems],
        f"{applied:.1%} of small updates are applied (tolerance {tolerance:.1%})"
        + (f"; {', '.join(keys)} are rounded without drift and independently" if keys else ""),
        "; ".join(problems.values()),
        **numbers,
    )


def _list_rounded_keys(config: Config) -> list[str]:
    """Return the parts of the state that are rounded stochastically."""
    if not _has_stochastic_rounding(config):
        return []
    optimizer = get_optimizer_spec(config.optimizer.name)
    tensors = optimizer.list_state_tensors(ParameterRole.matrix)
    update_dtype = optimizer.get_matrix_update_dtype(config.optimizer)
    # Errors of updates in bf16 are larger than those of the rounding
    is_exact = optimizer.is_elementwise(ParameterRole.matrix) or update_dtype is Dtype.fp32
    dtypes = {"weights": _get_update_dtype(config)} if is_exact else {}
    dtypes |= {
        tensor.name: tensor.get_dtype(config.precision)
        for tensor in tensors
        if is_exact or tensor.decay is not None
    }
    return [key for key, dtype in dtypes.items() if dtype is Dtype.bf16]


def _get_update_dtype(config: Config) -> Dtype:
    return config.precision.master_weight_dtype or config.precision.param_dtype


def _measure_applied(
    config: Config, before: dict[str, ReferenceState], exact: States, stored: States
) -> tuple[float, float]:
    """Return the share of small updates of matrices that is applied, and its tolerance."""
    is_bf16, sums = _get_update_dtype(config) is Dtype.bf16, np.zeros(3)
    for exact_state, state in zip(exact, stored, strict=True):
        for name, initial in before.items():
            weight = initial.weights
            # Norm weights are close to one, where such an update rarely changes the value
            if weight.ndim == 1:
                continue
            requested = exact_state[name].weights - weight
            spacing = compute_spacing(weight)
            small = np.abs(requested) < spacing / 2 if is_bf16 else np.full(weight.shape, True)
            fraction = np.minimum(np.abs(requested) / spacing, 1) * is_bf16
            change, variance = state[name].weights - weight, fraction * (1 - fraction)
            terms = (change * requested, requested**2, requested**2 * spacing**2 * variance)
            sums += [term[small].sum() for term in terms]
    return float(sums[0] / sums[1]), float(_SIGMAS * np.sqrt(sums[2]) / sums[1] + _TOLERANCE)


def _find_drifts(keys: list[str], exact: States, stored: States) -> dict[str, str]:
    """Return the parts of the state that are rounded up or down too often."""
    problems = {}
    for key in keys:
        residuals = [
            compute_residuals(values.tensors[key], state[name].tensors[key]).ravel()
            for exact_state, state in zip(exact, stored, strict=True)
            for name, values in exact_state.items()
            if key in values.tensors
        ]
        mean, deviation = compute_mean(np.concatenate(residuals))
        if not abs(mean) <= _SIGMAS * deviation + _TOLERANCE / 10:
            direction = "away from" if mean > 0 else "towards"
            problems[f"drift of the {key}"] = (
                f"{key} are rounded {direction} zero too often, by {abs(mean):.1e} standard "
                f"deviations of the rounding (tolerance {_SIGMAS * deviation:.1e})"
            )
    return problems


def _find_dependence(keys: list[str], exact: States, stored: States) -> dict[str, str]:
    """Return the axes along which the rounding of different elements is correlated.

    They are compared between tensors with the shape of the weights.
    """
    first = next(state for state in exact[0].values() if {*keys} <= {*state.tensors})
    keys = [key for key in keys if first.tensors[key].shape == first.weights.shape]
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, state in exact[0].items():
        if state.weights.ndim > 1 and {*keys} <= {*state.tensors}:
            by_shape.setdefault(state.weights.shape, []).append(name)
    sums = np.zeros((len(_AXES), 2))
    for names in by_shape.values():
        residuals = np.array([_stack_residuals(key, names, exact, stored) for key in keys])
        sums += [sum_pairs(residuals, axis) for axis in range(len(_AXES))]
    problems = {}
    for axis, (products, num_pairs) in zip(_AXES, sums, strict=True):
        if num_pairs and abs(products) > _SIGMAS * np.sqrt(num_pairs) + _TOLERANCE * num_pairs:
            problems[f"random bits of {axis}"] = (
                f"rounding errors of {axis} have a correlation of {products / num_pairs:.2f}: "
                "random bits are shared"
            )
    return problems


def _stack_residuals(key: str, names: list[str], exact: States, stored: States) -> Array:
    """Return the residuals of matrices of one shape, [steps, names, rows, columns]."""
    return np.array(
        [
            [compute_residuals(one[n].tensors[key], other[n].tensors[key]) for n in names]
            for one, other in zip(exact, stored, strict=True)
        ]
    )
