"""Checks of the optimizer against a reference, for single steps and a short run in fp64.

A step with zero gradients shows all decays, bias corrections, epsilon and the weight decay exactly.
In the other steps the gradient follows from a part of the state that was zero before.
"""

import math
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hlat.config.precision import Dtype
from hlat.config.run import Config
from hlat.doctor import reference_model, tolerances
from hlat.doctor.check_result import CheckResult, FaultLocation, build_result, skip_check
from hlat.doctor.engine_harness import EngineHarness
from hlat.doctor.extension_reference import build_reference_update
from hlat.doctor.reference_optimizer import (
    ReferenceState,
    build_states,
    find_reference_update,
    format_missing_reference,
)
from hlat.doctor.reference_parametrization import ParameterUpdate, adapt_update
from hlat.doctor.reference_updates import update_states
from hlat.doctor.sampled_inputs import (
    FullTensors,
    StateTensors,
    build_masks,
    remove_gradients,
    sample_batch,
    sample_documents,
    sample_optimizer_state,
    sample_weights,
)
from hlat.model.decoder_spec import list_buffer_specs, list_parameter_specs
from hlat.model.parameter_spec import ParameterRole
from hlat.optim.optimizer_spec import (
    EMA,
    StateTensor,
    compute_saved_shapes,
    get_optimizer_spec,
)
from hlat.recovery.preflight_checks import format_first

_STEPS = ((0, 0.0, 2.0**-3), (1, 2.0**-17, 2.0**-4), (1000, 2.0**-17, 2.0**-3))
"""Number of updates, average of squared gradients, and learning rate of steps with gradients. An
update is many spacings of bf16; consecutive rates differ, so that the rate of another step is
noticed."""
_NUM_UPDATES, _LEARNING_RATE = 3, 2.0**-4
"""Number of updates and learning rate of the step without gradients."""
_MATRIX_ERRORS = 16.0
"""Relative error of the update of a whole matrix over the unit roundoff of gradient and update."""
_NUM_STEPS = 12
_MAX_LEARNING_RATE = 1e-3
_TOLERANCES = {Dtype.fp32: 1e-4, Dtype.bf16: 0.05}
"""Maximum relative error of the gradient norm at any step, by the dtype of matmuls."""


class _Error(NamedTuple):
    """Error of a part of the state after an update, over its tolerance."""

    part: str
    value: float
    update: int
    detail: str = ""


def check_optimizer(harness: EngineHarness) -> Iterator[CheckResult]:
    """Check weights, moments and update counts after one step from several states."""
    settings = harness.config.optimizer
    reference = find_reference_update(settings) or build_reference_update(harness.config)
    if reference is None:
        yield skip_check("optimizer", format_missing_reference(harness.config.optimizer))
        return
    errors, update = list[_Error](), adapt_update(harness.config, reference)
    for num_updates, square, learning_rate in _STEPS:
        errors += _step_with_gradients(harness, update, num_updates, square, learning_rate)
    with harness.without_router_losses() as other:
        errors += _step_without_gradients(other, update)
    if not harness.optimizer.is_elementwise(ParameterRole.matrix):
        errors += _step_from_random_state(harness, update)
    if not harness.is_rank0:
        return
    wrong: dict[str, _Error] = {}
    for error in errors:
        if not error.value <= 1:
            wrong.setdefault(error.part, error)
    # A wrong setting, which has a detail, is the cause of wrong moments and weights
    ranked = sorted(wrong.values(), key=lambda error: (not error.detail, -error.value))
    problems = [
        f"{error.part}{error.detail} at update {error.update}, {error.value:.1f} times"
        for error in ranked
    ]
    largest, title = max(error.value for error in errors), harness.optimizer.title
    yield build_result(
        "optimizer",
        [FaultLocation(error.part, "update") for error in ranked],
        f"updates are those of {title} in fp64 to {largest:.2f} of the tolerance",
        f"beyond the tolerance of {title} in fp64: " + format_first(problems, separator="; "),
        largest=largest,
    )


def check_numerics(harness: EngineHarness) -> Iterator[CheckResult]:
    """Compare the gradient norm at each step with that of the reference."""
    config, reference = harness.config, find_reference_update(harness.config.optimizer)
    if reference is None:
        yield skip_check("numerics", format_missing_reference(config.optimizer))
        return
    lr = min(config.optimizer.lr, _MAX_LEARNING_RATE)
    norms = [metrics.grad_norm for metrics in harness.train(_NUM_STEPS, lr)]
    if not harness.is_rank0:
        return
    ratios = np.array(norms, np.float64) / _train_fp64_reference(
        config, adapt_update(config, reference), lr
    )
    largest = float(np.abs(ratios - 1).max())
    optimizer = harness.optimizer
    dtypes = [config.precision.compute_dtype]
    if not optimizer.is_elementwise(ParameterRole.matrix):
        dtypes.append(optimizer.get_matrix_update_dtype(config.optimizer))
    if any(tensor.is_basis for tensor in optimizer.list_state_tensors(ParameterRole.matrix)):
        dtypes.append(Dtype.bf16)  # rounding errors determine eigenvectors of an eigenvalue of zero
    tolerance = max(_TOLERANCES[dtype] for dtype in dtypes)
    growth = float(ratios[-1] / ratios[0])
    yield build_result(
        "numerics",
        [] if largest <= tolerance else [FaultLocation("grad_norm", "precision")],
        f"over {_NUM_STEPS} steps the gradient norm is that of the fp64 reference to {largest:.1e}",
        f"over {_NUM_STEPS} steps the gradient norm differs from the fp64 reference by "
        f"{largest:.1%} (tolerance {tolerance:.1%}) and grows {growth:.3g} times as much",
        largest=largest,
        growth=growth,
        tolerance=tolerance,
    )


def _step_with_gradients(
    harness: EngineHarness,
    update: ParameterUpdate,
    num_updates: int,
    square: float,
    learning_rate: float,
) -> list[_Error]:
    """Return the errors after a step from a state that is zero, except for averages of squares."""
    config, weights = harness.config, sample_weights(harness.config, 5)
    num_updates = max(num_updates, harness.optimizer.num_initial_updates)
    initial = {
        role: {
            tensor.name: square * tensor.is_squared
            for tensor in harness.optimizer.list_state_tensors(role)
        }
        for role in ParameterRole
    }
    harness.load_weights(weights)
    values = {key: value for state in initial.values() for key, value in state.items()}
    harness.set_optimizer_state(num_updates, **values)
    harness.train_step(sample_batch(config, 5), learning_rate)
    after, gradients = harness.gather_state(), _measure_gradients(harness, weights)
    before = {}
    for name in gradients:
        state, shapes = initial[harness.parameters[name].role], harness.compute_state_shapes(name)
        tensors = {key: np.full(shape, state.get(key, 0.0)) for key, shape in shapes.items()}
        tensors["weights"] = weights[name].astype(np.float64)
        before[name] = ReferenceState(tensors, num_updates)
    return _compare_updates(harness, update, before, gradients, after, learning_rate)


def _measure_gradients(harness: EngineHarness, weights: FullTensors) -> FullTensors:
    """Return the clipped gradients of the step that the harness has run from these weights."""
    with harness.with_gradient_source() as other:
        if other is not harness:
            other.load_weights(weights)
            other.set_optimizer_state()
            other.train_step(sample_batch(harness.config, 5), 0.0)
        return other.gather_gradients()


def _step_from_random_state(harness: EngineHarness, update: ParameterUpdate) -> list[_Error]:
    """Return the errors of whole matrices after a step from a random state.

    The size of a gradient has no effect on an orthogonalized matrix, and a basis of zero gives no
    update, so that steps from zero do not depend on all of the state.
    """
    config, weights = harness.config, sample_weights(harness.config, 5)
    tokens, num_updates = sample_batch(config, 5), _STEPS[-1][0]
    harness.load_weights(weights)
    harness.set_optimizer_state(harness.optimizer.num_initial_updates)
    harness.train_step(tokens, 0.0)
    gradients = harness.gather_gradients()
    rms = {name: float(np.sqrt(np.square(one).mean())) for name, one in gradients.items()}
    before = sample_optimizer_state(config, harness.broadcast_object(rms))
    before["weights"] = weights
    harness.set_optimizer_state(num_updates)
    harness.load_tensors(before)
    harness.train_step(tokens, _LEARNING_RATE)
    after = harness.gather_state()
    if not harness.is_rank0:
        return []
    optimizer = harness.optimizer
    states = {
        name: state
        for name, state in build_states(before, num_updates).items()
        if not optimizer.is_elementwise(harness.parameters[name].role)
    }
    errors = _compare_updates(harness, update, states, gradients, after, _LEARNING_RATE)
    # Average and gradient cancel in some elements of the average
    source = optimizer.get_gradient_source(config.optimizer, ParameterRole.matrix)
    assert source is not None
    return [error for error in errors if not error.part.endswith(f" {source[0]}")]


def _step_without_gradients(harness: EngineHarness, update: ParameterUpdate) -> list[_Error]:
    """Return the errors after a step with gradients of zero, and those of the decays."""
    config = harness.config
    before = {"weights": remove_gradients(config, sample_weights(config, 5))}
    before |= sample_optimizer_state(config)
    harness.set_optimizer_state(_NUM_UPDATES)
    harness.load_tensors(before)
    harness.train_step(sample_batch(config, 5), _LEARNING_RATE)
    after = harness.gather_state()
    if not harness.is_rank0:
        return []
    states = build_states(before, _NUM_UPDATES)
    errors = _compare_updates(harness, update, states, None, after, _LEARNING_RATE)
    return errors + _compare_decays(harness, before, after)


def _compare_updates(
    harness: EngineHarness,
    update: ParameterUpdate,
    before: Mapping[str, ReferenceState],
    gradients: FullTensors | None,
    after: StateTensors,
    learning_rate: float,
) -> list[_Error]:
    """Return the errors of all parameters after an update with gradients, or with zeros."""
    exact = None
    if gradients is not None:
        exact = {name: one.astype(np.float64) for name, one in gradients.items()}
    expected = update_states(harness.config, update, before, exact, learning_rate)
    return [
        error
        for name, state in before.items()
        for error in _compare_states(harness, name, state, expected[name], after, learning_rate)
    ]


def _compare_decays(
    harness: EngineHarness, before: StateTensors, after: StateTensors
) -> list[_Error]:
    """Return the errors of the factors of the state in a step without gradients."""
    config, errors = harness.config, list[_Error]()
    for tensor in harness.optimizer.list_state_tensors(ParameterRole.matrix):
        name, key = tensor.decay, tensor.name
        if name is None or not before[key]:
            continue
        decay = attrgetter(name)(config.optimizer)
        roundoff = tolerances.compute_unit_roundoff(tensor.get_dtype(config.precision))
        old, new = (
            np.concatenate([tensor.ravel() for tensor in state[key].values()]).astype(np.float64)
            for state in (before, after)
        )
        measured = float((new * old).sum() / (old * old).sum())
        detail = f": {key} decays by {measured:.4g} instead of {decay:g}"
        value = abs(measured - decay) / (roundoff + 1e-6)
        errors.append(_Error(f"optimizer.{name}", value, _NUM_UPDATES + 1, detail))
    return errors


def _compare_states(
    harness: EngineHarness,
    name: str,
    before: ReferenceState,
    expected: ReferenceState,
    after: StateTensors,
    learning_rate: float,
) -> Iterator[_Error]:
    """Yield each part of the update of a parameter and its largest error over the tolerance."""
    config, count = harness.config, expected.updates
    settings, role = config.optimizer, harness.parameters[name].role
    gap = after["weights"][name] - expected.weights
    update_error = 0.0
    if not harness.optimizer.is_elementwise(role):
        update_error = _compute_update_error(config, before, expected, learning_rate)
    roundoff = tolerances.compute_unit_roundoff(config.precision.optimizer_state_dtype)
    dtype = config.precision.master_weight_dtype or config.precision.param_dtype
    spacing = np.abs(expected.weights) * 2.0 ** (-7 if dtype is Dtype.bf16 else -22)
    tolerance = spacing + learning_rate * (8 * roundoff + 2.0**-13 + update_error)
    if update_error:  # errors of a matrix are not those of its elements
        error = math.sqrt(np.square(gap).sum() / np.square(tolerance).sum())
    else:
        error = float((np.abs(gap) / tolerance).max())
    yield _Error(f"{name} weights", error, count)
    square = np.square(before.weights).sum()
    if settings.weight_decay and square and (settings.decay_norms or gap.ndim > 1):
        slope = (gap * before.weights).sum() / square / learning_rate
        chance = 4 * np.sqrt((spacing**2).sum() / square / gap.size) / learning_rate
        value = float(abs(slope) / (settings.weight_decay / 4 + chance))
        yield _Error(f"{name} weight decay", value, count)
    source = harness.optimizer.get_gradient_source(settings, role)
    state = {one.name: one for one in compute_saved_shapes(settings, role, gap.shape)}
    for key, tensor in expected.tensors.items():
        if key == "weights":
            continue
        if state[key].is_weights:
            arguments = before, expected, after[key][name], gap, learning_rate
            error = _compute_copy_error(config, state[key], *arguments)
        else:
            is_product = not harness.optimizer.is_elementwise(role) and (
                source is None or key != source[0]
            )
            error = _compute_state_error(config, after[key][name], tensor, is_product)
        yield _Error(f"{name} {key}", error, count)
    yield _Error(f"{name} updates", float(abs(after["updates"][name] - count) * 2), count)


def _compute_state_error(
    config: Config, found: NDArray[Any], expected: NDArray[Any], is_product: bool
) -> float:
    """Return the error of a state tensor over its tolerance.

    Elements of products of matrices cancel, so that their tolerance is relative to all elements.
    """
    dtype = config.precision.optimizer_state_dtype
    gap = found - expected
    if not is_product:
        tolerance = np.abs(expected) * 8 * tolerances.compute_unit_roundoff(dtype)
        return float((np.abs(gap) / (tolerance + 1e-20)).max())
    optimizer = get_optimizer_spec(config.optimizer.name)
    dtypes = dtype, optimizer.get_matrix_update_dtype(config.optimizer)
    relative = float(np.linalg.norm(gap) / (np.linalg.norm(expected) + 1e-20))
    return relative / (_MATRIX_ERRORS * tolerances.compute_unit_roundoff(*dtypes))


def _compute_copy_error(
    config: Config,
    tensor: StateTensor,
    before: ReferenceState,
    expected: ReferenceState,
    found: NDArray[Any],
    weight_gap: NDArray[Any],
    learning_rate: float,
) -> float:
    """Return the error over its tolerance of a state tensor that starts as the weights.

    Values of both signs cancel in it, so that its tolerance is relative to them. A moving average
    is that of the actual weights, the errors of which are `weight_gap`.
    """
    values = expected.tensors[tensor.name]
    if tensor is EMA:
        assert config.optimizer.ema_decay is not None
        values = values + (1 - config.optimizer.ema_decay) * weight_gap
    size = np.abs(before.tensors[tensor.name]) + np.abs(before.weights)
    tolerance = size * 8 * tolerances.compute_unit_roundoff(tensor.get_dtype(config.precision))
    roundoff = tolerances.compute_unit_roundoff(config.precision.optimizer_state_dtype)
    tolerance += learning_rate * (8 * roundoff + 2.0**-13)
    return float((np.abs(found - values) / tolerance).max())


def _compute_update_error(
    config: Config, before: ReferenceState, expected: ReferenceState, learning_rate: float
) -> float:
    """Return the root mean square of the errors of a whole matrix's update.

    They are relative to the update, as products of matrices multiply rounding errors.
    """
    optimizer, settings = get_optimizer_spec(config.optimizer.name), config.optimizer
    roundoff = tolerances.compute_unit_roundoff(
        optimizer.get_matrix_update_dtype(settings), config.precision.optimizer_state_dtype
    )
    decayed = before.weights * (1 - learning_rate * settings.weight_decay)
    rms = float(np.sqrt(np.square(expected.weights - decayed).mean())) / learning_rate
    return rms * _MATRIX_ERRORS * roundoff


def _train_fp64_reference(
    config: Config, update: ParameterUpdate, learning_rate: float
) -> list[float]:
    """Train the reference model in fp64; return its gradient norms."""
    weights = {
        name: torch.from_numpy(weight).double().requires_grad_()
        for name, weight in sample_weights(config).items()
    }
    tensors = {"weights": {name: weight.detach().numpy() for name, weight in weights.items()}}
    for spec in list_parameter_specs(config.model):
        shapes = compute_saved_shapes(config.optimizer, spec.role, spec.shape)
        for tensor, shape in shapes.items():
            initial = tensors["weights"][spec.name] if tensor.is_weights else np.zeros(shape)
            tensors.setdefault(tensor.name, {})[spec.name] = initial
    states, buffers = build_states(tensors, 0), _build_buffers(config)
    norms = []
    for seed in range(_NUM_STEPS):
        tokens = sample_batch(config, seed)
        masks = build_masks(config, sample_documents(config, tokens))
        leaves = weights | buffers
        _, objective = reference_model.compute_loss_sums(config.model, leaves, tokens, masks)
        num_targets = reference_model.count_targets(tokens, masks)
        (objective / num_targets).backward()  # type: ignore[no-untyped-call]
        max_norm = config.optimizer.grad_clip or float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(weights.values(), max_norm)))
        gradients = {name: _get_gradient(weight) for name, weight in weights.items()}
        states = update_states(config, update, states, gradients, learning_rate)
        for name, weight in weights.items():
            weight.detach().copy_(torch.from_numpy(states[name].weights))
            weight.grad = None
    return norms


def _build_buffers(config: Config) -> dict[str, torch.Tensor]:
    """Return the initial buffers, which do not require gradients."""
    return {
        spec.name: torch.full(spec.shape, spec.initial_value, dtype=torch.float64)
        for spec in list_buffer_specs(config.model)
    }


def _get_gradient(weight: torch.Tensor) -> NDArray[np.float64]:
    assert weight.grad is not None
    return weight.grad.numpy()
