"""Checks of the optimizer against a reference, and of a short run against torch's AdamW in fp64.

A step with zero gradients shows both decays, the bias corrections, epsilon and the weight decay
exactly. In the other steps the gradient follows from the first moment, which was zero before.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from hlat.config.precision import Dtype
from hlat.config.run import Config
from hlat.doctor import reference_model, tolerances
from hlat.doctor.check_result import CheckResult, FaultLocation, build_result
from hlat.doctor.engine_harness import (
    EngineHarness,
    StateTensors,
    build_masks,
    remove_gradients,
    sample_batch,
    sample_documents,
    sample_moments,
    sample_weights,
)
from hlat.doctor.reference_optimizer import AdamWState, build_states, update_adamw
from hlat.recovery.preflight_checks import format_first

_STEPS = ((0, 0.0, 2.0**-3), (1, 2.0**-17, 2.0**-4), (1000, 2.0**-17, 2.0**-3))
"""Number of updates, value of the second moment, and learning rate of steps with gradients. An
update is many spacings of bf16; consecutive rates differ, so that the rate of another step is
noticed."""
_NUM_UPDATES, _LEARNING_RATE = 3, 2.0**-4
"""Number of updates and learning rate of the step without gradients."""
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
    errors: list[_Error] = []
    for num_updates, exp_avg_sq, learning_rate in _STEPS:
        errors += _step_with_gradients(harness, num_updates, exp_avg_sq, learning_rate)
    errors += _step_without_gradients(harness)
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
    largest = max(error.value for error in errors)
    yield build_result(
        "optimizer",
        [FaultLocation(error.part, "update") for error in ranked],
        f"updates are those of AdamW in fp64 to {largest:.2f} of the tolerance",
        "beyond the tolerance of AdamW in fp64: " + format_first(problems, separator="; "),
        largest=largest,
    )


def check_numerics(harness: EngineHarness) -> Iterator[CheckResult]:
    """Compare the gradient norm at each step with that of the reference."""
    config = harness.config
    lr = min(config.optimizer.lr, _MAX_LEARNING_RATE)
    norms = [metrics.grad_norm for metrics in harness.train(_NUM_STEPS, lr)]
    if not harness.is_rank0:
        return
    ratios = np.array(norms, np.float64) / _train_fp64_reference(config, lr)
    largest, tolerance = float(np.abs(ratios - 1).max()), _TOLERANCES[config.precision.compute]
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
    harness: EngineHarness, num_updates: int, exp_avg_sq: float, learning_rate: float
) -> list[_Error]:
    """Return the errors after a step from a first moment of zero."""
    config, weights = harness.config, sample_weights(harness.config, 5)
    harness.load_weights(weights)
    harness.set_optimizer_state(num_updates, exp_avg_sq)
    harness.train_step(sample_batch(config, 5), learning_rate)
    after, errors = harness.gather_state(), list[_Error]()
    for name, exp_avg in after["exp_avg"].items():
        zeros, exp_avg_sqs = np.zeros(exp_avg.shape), np.full(exp_avg.shape, exp_avg_sq)
        before = AdamWState(weights[name].astype(np.float64), zeros, exp_avg_sqs, num_updates)
        gradient = exp_avg.astype(np.float64) / (1 - config.optimizer.beta1)
        expected = update_adamw(config.optimizer, before, gradient, learning_rate)
        errors += _compare_states(config, name, before, expected, after, learning_rate)
    return errors


def _step_without_gradients(harness: EngineHarness) -> list[_Error]:
    """Return the errors after a step with gradients of zero, and those of the decays."""
    config = harness.config
    before = {"weights": remove_gradients(config, sample_weights(config, 5))}
    before |= sample_moments(config)
    harness.set_optimizer_state(_NUM_UPDATES)
    harness.load_tensors(before)
    harness.train_step(sample_batch(config, 5), _LEARNING_RATE)
    after, errors = harness.gather_state(), list[_Error]()
    if not harness.is_rank0:
        return errors
    for name, state in build_states(before, _NUM_UPDATES).items():
        expected = update_adamw(config.optimizer, state, 0.0, _LEARNING_RATE)
        errors += _compare_states(config, name, state, expected, after, _LEARNING_RATE)
    return errors + _compare_decays(config, before, after)


def _compare_decays(config: Config, before: StateTensors, after: StateTensors) -> list[_Error]:
    """Return the errors of the factors of the moments in a step without gradients."""
    settings, errors = config.optimizer, list[_Error]()
    roundoff = tolerances.compute_unit_roundoff(config.precision.optimizer_state)
    for name, key, decay in (
        ("beta1", "exp_avg", settings.beta1),
        ("beta2", "exp_avg_sq", settings.beta2),
    ):
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
    config: Config,
    name: str,
    before: AdamWState,
    expected: AdamWState,
    after: StateTensors,
    learning_rate: float,
) -> Iterator[_Error]:
    """Yield each part of the update of a parameter and its largest error over the tolerance."""
    settings, count = config.optimizer, expected.updates
    roundoff = tolerances.compute_unit_roundoff(config.precision.optimizer_state)
    dtype = config.precision.master_weights or config.precision.weights
    spacing = np.abs(expected.weights) * 2.0 ** (-7 if dtype is Dtype.bf16 else -22)
    gap = after["weights"][name] - expected.weights
    tolerance = spacing + learning_rate * (8 * roundoff + 2.0**-13)
    yield _Error(f"{name} weights", float((np.abs(gap) / tolerance).max()), count)
    square = np.square(before.weights).sum()
    if settings.weight_decay and square and (settings.decay_norms or gap.ndim > 1):
        slope = (gap * before.weights).sum() / square / learning_rate
        chance = 4 * np.sqrt((spacing**2).sum() / square / gap.size) / learning_rate
        value = float(abs(slope) / (settings.weight_decay / 4 + chance))
        yield _Error(f"{name} weight decay", value, count)
    for key, moment in (("exp_avg", expected.exp_avg), ("exp_avg_sq", expected.exp_avg_sq)):
        errors = np.abs(after[key][name] - moment) / (np.abs(moment) * 8 * roundoff + 1e-20)
        yield _Error(f"{name} {key}", float(errors.max()), count)
    yield _Error(f"{name} updates", float(abs(after["updates"][name] - count) * 2), count)


def _build_torch_adamw(
    config: Config, weights: Sequence[torch.Tensor], learning_rate: float
) -> torch.optim.AdamW:
    """Return torch's plain AdamW for the weights, with the settings of the run."""
    settings = config.optimizer
    decay, norm_decay = settings.weight_decay, settings.weight_decay * settings.decay_norms
    return torch.optim.AdamW(
        [{"params": [w], "weight_decay": decay if w.dim() > 1 else norm_decay} for w in weights],
        lr=learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        foreach=False,
        fused=False,
    )


def _train_fp64_reference(config: Config, learning_rate: float) -> list[float]:
    """Train the reference model in fp64; return its gradient norms."""
    weights = {
        name: torch.from_numpy(weight).double().requires_grad_()
        for name, weight in sample_weights(config).items()
    }
    adamw = _build_torch_adamw(config, [*weights.values()], learning_rate)
    norms = []
    for seed in range(_NUM_STEPS):
        tokens = sample_batch(config, seed)
        masks = build_masks(config, sample_documents(config, tokens))
        adamw.zero_grad()
        _, objective = reference_model.compute_loss_sums(config.model, weights, tokens, masks)
        num_targets = reference_model.count_targets(tokens, masks)
        (objective / num_targets).backward()  # type: ignore[no-untyped-call]
        max_norm = config.optimizer.grad_clip or float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(weights.values(), max_norm)))
        adamw.step()
    return norms
