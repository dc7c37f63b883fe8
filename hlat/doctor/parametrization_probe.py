"""Probe of a parametrization in a model that is larger than its base.

Initial values, the forward pass and one update are compared with the rules of
reference_parametrization. Each difference is attributed to a quantity of the rules.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from hlat.config.run import Config
from hlat.doctor import reference_model, tolerances
from hlat.doctor.engine_harness import EngineHarness
from hlat.doctor.reference_optimizer import Array, ReferenceState, find_reference_update
from hlat.doctor.reference_parametrization import adapt_update, compute_init_std
from hlat.doctor.sampled_inputs import (
    FullTensors,
    build_masks,
    sample_batch,
    sample_documents,
    sample_weights,
)
from hlat.model.parameter_spec import Initialization, ParameterRole

EPS = 1e-3
"""eps of the probe, of the size of the gradients, so that an update depends on it."""
_MULTIPLIERS = {
    "attention scale": "base_head_dim",
    "residual multiplier": "base_depth",
    "output multiplier": "base_width",
}
"""Size of the base without which a factor is that of the standard parametrization."""
_SIGMAS, _ROUNDING = 6, 2.0**-9
_TOLERANCE, _MATRIX_ERRORS = 0.02, 16.0
"""Relative error of a rate or decay, and errors of whole matrices over the unit roundoff."""


def find_faults(harness: EngineHarness) -> Iterator[tuple[str, str]]:
    """Yield each wrong quantity with a description, given an engine with its initial weights."""
    yield from _find_wrong_initial_values(harness, harness.gather_full_tensors("weights"))
    yield from _find_wrong_multiplier(harness)
    yield from _find_wrong_updates(harness)


def _find_wrong_initial_values(
    harness: EngineHarness, weights: FullTensors
) -> Iterator[tuple[str, str]]:
    wrong: dict[str, str] = {}
    for name, values in weights.items():
        spec = harness.parameters[name]
        if spec.init is not Initialization.normal:
            continue
        expected, measured = compute_init_std(harness.config.model, name), float(values.std())
        tolerance = _SIGMAS / np.sqrt(2 * values.size) + _ROUNDING
        if not abs(measured / expected - 1) <= tolerance:
            text = f"the standard deviation of {name} is {measured:.4g}, the rule is {expected:.4g}"
            wrong.setdefault(f"initialization of {spec.role.value}", text)
    yield from wrong.items()


def _find_wrong_multiplier(harness: EngineHarness) -> Iterator[tuple[str, str]]:
    """Yield the factor without which the reference has the measured loss, if the loss is wrong."""
    config, weights = harness.config, sample_weights(harness.config)
    tokens = sample_batch(config)
    documents = sample_documents(config, tokens)
    harness.load_weights(weights)
    measured = harness.evaluate(tokens, documents)
    masks = build_masks(config, documents)

    def is_loss_of(base_size: str | None) -> tuple[bool, float]:
        model = config.model
        if base_size is not None:
            unset: dict[str, Any] = {base_size: None}
            model = replace(model, parametrization=replace(model.parametrization, **unset))
        loss = reference_model.compute_mean_loss(model, weights, tokens, masks)
        return abs(measured / loss - 1) <= tolerances.compute_loss_tolerance(config), loss

    is_right, expected = is_loss_of(None)
    if is_right:
        return
    found = [
        name
        for name, size in _MULTIPLIERS.items()
        if getattr(config.model.parametrization, size) is not None and is_loss_of(size)[0]
    ]
    part = found[0] if found else "forward pass"
    if part == "output multiplier" and config.model.tie_embeddings:
        part = "output multiplier of the tied head"
    cause = ", which it is without this factor" if found else ""
    yield part, f"the loss is {measured:.5f}, the rule gives {expected:.5f}{cause}"


def _find_wrong_updates(harness: EngineHarness) -> Iterator[tuple[str, str]]:
    """Yield the rate, decay and eps of each role that differ from the rules in one update.

    Optimizers without a reference, or without a multiple of the gradient in their state, have none.
    """
    config, weights = harness.config, sample_weights(harness.config)
    reference = find_reference_update(config.optimizer)
    source = harness.optimizer.get_gradient_source(config.optimizer, ParameterRole.matrix)
    if reference is None or source is None:
        return
    harness.load_weights(weights)
    num_updates = harness.optimizer.num_initial_updates
    harness.set_optimizer_state(num_updates)
    lr = config.optimizer.lr
    harness.train_step(sample_batch(config), lr)
    after, gradients = harness.gather_full_tensors("weights"), harness.gather_gradients()
    wrong: dict[str, str] = {}
    for name, weight in weights.items():
        shapes = harness.compute_state_shapes(name)
        tensors = {key: np.zeros(shape) for key, shape in shapes.items()}
        state = ReferenceState(tensors | {"weights": weight.astype(np.float64)}, num_updates)
        expected = {
            key: adapt_update(variant, reference)(
                name, state, gradients[name].astype(np.float64), lr
            ).weights
            - state.weights
            for key, variant in _build_variants(config).items()
        }
        measured = after[name].astype(np.float64) - state.weights
        role = harness.parameters[name].role.value
        for quantity, text in _compare_update(harness, measured, expected, state.weights):
            wrong.setdefault(f"{quantity} of {role}", f"{text} for {name}")
    yield from wrong.items()


def _build_variants(config: Config) -> dict[str, Config]:
    """Return the configuration, one without decay, and one without decay and scaling of eps."""
    optimizer, model = config.optimizer, config.model
    without_decay = replace(config, optimizer=replace(optimizer, weight_decay=0.0))
    width = model.hidden_size / (model.parametrization.base_width or model.hidden_size)
    larger_eps = replace(without_decay.optimizer, eps=optimizer.eps * width)
    return {
        "update": config,
        "step": without_decay,
        "step with eps of the base": replace(without_decay, optimizer=larger_eps),
    }


def _compare_update(
    harness: EngineHarness,
    measured: Array,
    expected: Mapping[str, Array],
    weights: Array,
) -> Iterator[tuple[str, str]]:
    """Yield the wrong quantities of the update of a parameter.

    The update is a sum of the step and the decayed weights, whose coefficients least squares give.
    """
    optimizer, settings = harness.optimizer, harness.config.optimizer
    roundoff = tolerances.compute_unit_roundoff(optimizer.get_matrix_update_dtype(settings))
    tolerance = _TOLERANCE + _MATRIX_ERRORS * roundoff
    step, decayed = expected["step"], expected["update"] - expected["step"]
    rate, decay, residual = _fit(measured, step, weights)
    other_rate, _, other_residual = _fit(measured, expected["step with eps of the base"], weights)
    if residual > tolerance and other_residual < residual / 2:
        yield "eps", f"an update is {other_rate:.3g} times that with the eps of the base"
        return
    if residual > tolerance or abs(rate - 1) > tolerance:
        yield "learning rate", f"an update is {rate:.3g} times that of the rule"
        return
    exact = float((decayed * weights).sum() / (weights * weights).sum())
    if abs(decay - exact) > tolerance * max(abs(exact), 1e-12) * 5:
        ratio = decay / exact if exact else float("inf")
        yield "weight decay", f"the decay is {ratio:.3g} times that of the rule"


def _fit(measured: Array, step: Array, weights: Array) -> tuple[float, float, float]:
    """Return the coefficients of step and weights, and the norm of the rest relative to the sum."""
    basis = np.stack([step.ravel(), weights.ravel()], axis=1)
    (rate, decay), *_ = np.linalg.lstsq(basis, measured.ravel())
    rest = measured.ravel() - rate * basis[:, 0] - decay * basis[:, 1]
    return float(rate), float(decay), float(np.linalg.norm(rest) / np.linalg.norm(measured))
