"""Checks of schedule, optimizer and a short run against torch's schedulers and AdamW in fp64.

The gradient of a step follows from the first moment after it if that was zero before. Each step of
the optimizer's check therefore starts from a zero first moment, a given second moment, and a given
number of updates.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim import lr_scheduler

from hlat.config.precision import Dtype
from hlat.config.run import Config
from hlat.config.schedule import ScheduleConfig, ScheduleShape
from hlat.doctor import reference_model, tolerances
from hlat.doctor.check_result import CheckResult, FaultLocation, build_result, skip_check
from hlat.doctor.engine_harness import EngineHarness, sample_batch, sample_weights
from hlat.optim.lr_schedule import compute_schedule_lr
from hlat.recovery.preflight_checks import format_first

_LEARNING_RATE = 2.0**-3
"""Large enough that an update is many spacings of bf16."""
_INITIAL_STATES = ((0, 0.0), (1, 2.0**-17), (1000, 2.0**-17))
"""Number of updates, and value of the second moment."""
_WARMUP_STEPS, _TOTAL_STEPS = 20, 200
_NUM_STEPS = 12
_MAX_LEARNING_RATE = 1e-3
_TOLERANCES = {Dtype.fp32: 1e-4, Dtype.bf16: 0.05}
"""Maximum relative error of the gradient norm at any step, by the dtype of matmuls."""

Array = NDArray[np.float64]


def check_optimizer(harness: EngineHarness) -> Iterator[CheckResult]:
    """Check weights, second moments and update counts after one step from several states."""
    config, largest = harness.config, 0.0
    wrong: dict[str, tuple[float, int]] = {}
    tokens, weights = sample_batch(config, 5), sample_weights(config, 5)
    for num_updates, exp_avg_sq in _INITIAL_STATES:
        harness.load_weights(weights)
        harness.set_optimizer_state(num_updates, exp_avg_sq)
        harness.train_step(tokens, _LEARNING_RATE)
        after = harness.gather_state()
        for name in after["weights"]:
            updated = {key: tensors[name].astype(np.float64) for key, tensors in after.items()}
            state = weights[name].astype(np.float64), num_updates, exp_avg_sq
            for part, error in _compute_errors(config, updated, *state):
                largest = max(largest, error)
                if not error <= 1:
                    wrong.setdefault(f"{name} {part}", (error, num_updates + 1))
    if not harness.is_rank0:
        return
    ranked = sorted(wrong.items(), key=lambda item: -item[1][0])
    problems = [f"{part} at update {count}, {error:.1f} times" for part, (error, count) in ranked]
    yield build_result(
        "optimizer",
        [FaultLocation(part, "update") for part, _ in ranked],
        f"updates are those of torch.optim.AdamW to {largest:.2f} of the tolerance",
        "beyond the tolerance of torch.optim.AdamW: " + format_first(problems, separator="; "),
        largest=largest,
    )


def check_schedule(harness: EngineHarness) -> Iterator[CheckResult]:
    """Check every learning rate of the shortened schedule against torch's scheduler."""
    config = harness.config
    peak_lr, schedule = config.optimizer.lr, _shorten_schedule(config.schedule)
    name, expected = schedule.name.value, _compute_torch_rates(schedule, peak_lr)
    if expected is None:
        yield skip_check("schedule", f"torch has no scheduler like schedule={name}")
        return
    lrs = [compute_schedule_lr(step, schedule, peak_lr) for step in range(len(expected))]
    errors = [abs(lr - other) / peak_lr for lr, other in zip(lrs, expected, strict=True)]
    wrong = [step for step, error in enumerate(errors) if not error <= 1e-6]
    first = wrong[0] if wrong else 0
    yield build_result(
        "schedule",
        [FaultLocation(f"rate of step {first}", "schedule")] if wrong else [],
        f"{len(errors)} rates of schedule={name} are torch's to {max(errors):.1e}",
        f"{len(wrong)} of {len(errors)} rates differ, first at step {first}: "
        f"{lrs[first]:.6g}, and {expected[first]:.6g} in torch",
        largest=max(errors),
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


def _compute_errors(
    config: Config, updated: dict[str, Array], before: Array, num_updates: int, exp_avg_sq: float
) -> Iterator[tuple[str, float]]:
    """Yield each part of a parameter's update and its largest error over the tolerance."""
    settings = config.optimizer
    gradient = updated["exp_avg"] / (1 - settings.beta1)
    expected, expected_sq = _run_torch_adamw(config, before, gradient, num_updates, exp_avg_sq)
    roundoff = tolerances.compute_unit_roundoff(config.precision.optimizer_state)
    dtype = config.precision.master_weights or config.precision.weights
    spacing = np.abs(expected) * 2.0 ** (-7 if dtype is Dtype.bf16 else -22)
    gap = updated["weights"] - expected
    tolerance = spacing + _LEARNING_RATE * (8 * roundoff + 2.0**-13)
    yield "weights", float((np.abs(gap) / tolerance).max())
    if settings.weight_decay and (settings.decay_norms or before.ndim > 1):
        square = (before * before).sum()
        slope = (gap * before).sum() / square / _LEARNING_RATE
        chance = 4 * np.sqrt((spacing**2).sum() / square / before.size) / _LEARNING_RATE
        yield "weight decay", float(abs(slope) / (settings.weight_decay / 4 + chance))
    gap_sq = np.abs(updated["exp_avg_sq"] - expected_sq)
    yield "exp_avg_sq", float((gap_sq / (expected_sq * 8 * roundoff + 1e-20)).max())
    yield "updates", float(abs(updated["updates"] - num_updates - 1) * 2)


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


def _run_torch_adamw(
    config: Config, before: Array, gradient: Array, num_updates: int, exp_avg_sq: float
) -> tuple[Array, Array]:
    """Return weights and second moments after one step of torch's plain AdamW."""
    weight = torch.from_numpy(before.copy()).requires_grad_()
    weight.grad = torch.from_numpy(gradient)
    adamw = _build_torch_adamw(config, [weight], _LEARNING_RATE)
    adamw.state[weight] = {
        "step": torch.tensor(float(num_updates)),
        "exp_avg": torch.zeros_like(weight),
        "exp_avg_sq": torch.full_like(weight, exp_avg_sq, requires_grad=False),
    }
    adamw.step()
    return weight.detach().numpy(), adamw.state[weight]["exp_avg_sq"].numpy()


def _shorten_schedule(schedule: ScheduleConfig) -> ScheduleConfig:
    """Return the same shape over few steps."""
    total = min(schedule.total_steps, _TOTAL_STEPS)
    max_warmup = total // 10 if schedule.total_steps > total else _WARMUP_STEPS
    warmup = min(schedule.warmup_steps, max_warmup)
    decay = None if schedule.decay_steps is None else min(schedule.decay_steps, total // 5)
    return replace(schedule, total_steps=total, warmup_steps=warmup, decay_steps=decay)


def _compute_torch_rates(schedule: ScheduleConfig, peak_lr: float) -> list[float] | None:
    """Return the learning rates of torch's scheduler; None if there is no such scheduler."""
    min_ratio, warmup = schedule.min_lr_ratio or 0.0, schedule.warmup_steps
    decay, min_lr = schedule.total_steps - warmup, peak_lr * min_ratio
    is_hlat = schedule.name is ScheduleShape.hlat
    optimizer: Any = torch.optim.SGD([torch.zeros((), requires_grad=True)], lr=peak_lr)
    schedulers: dict[ScheduleShape, Any] = {
        ScheduleShape.constant: lambda: lr_scheduler.ConstantLR(optimizer, 1.0, 1),
        ScheduleShape.cosine: lambda: lr_scheduler.CosineAnnealingLR(optimizer, decay, min_lr),
        ScheduleShape.hlat: lambda: lr_scheduler.CosineAnnealingLR(optimizer, decay, 0.0),
        ScheduleShape.linear: lambda: lr_scheduler.LinearLR(optimizer, 1.0, min_ratio, decay),
    }
    if schedule.name not in schedulers:
        return None
    rates = [peak_lr * (step + (not is_hlat)) / warmup for step in range(warmup)]
    scheduler = schedulers[schedule.name]()
    for _ in range(decay):
        rate = scheduler.get_last_lr()[0]
        rates.append(max(rate, min_lr) if is_hlat else rate)
        optimizer.step()
        scheduler.step()
    return rates


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
        num_targets = tokens.shape[0] * (tokens.shape[1] - 1)
        adamw.zero_grad()
        _, objective = reference_model.compute_loss_sums(config.model, weights, tokens)
        (objective / num_targets).backward()
        max_norm = config.optimizer.grad_clip or float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(weights.values(), max_norm)))
        adamw.step()
    return norms
