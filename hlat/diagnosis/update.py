"""Whether rate and update are those of torch's own schedulers and torch's own AdamW, in fp64.

A gradient can be read from the first moment after a step if that was zero before. So a step is
made from states with no first moment, some second one, and different counts of updates.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim import lr_scheduler

from hlat.config.precision import Dtype
from hlat.config.run import Config
from hlat.config.schedule import Schedule, Shape
from hlat.diagnosis import precise
from hlat.diagnosis.patient import Patient, batch, lively
from hlat.diagnosis.verdict import Culprit, Outcome, judged, not_applicable
from hlat.schedule import learning_rate

_RATE = 2.0**-3
"""So large that an update is many spacings of bf16."""
_STATES = ((0, 0.0), (1, 2.0**-17), (1000, 2.0**-17))
"""Updates before, and every second moment."""
_WARMUP, _TOTAL = 20, 200
_SHOWN = 3

Array = NDArray[np.float64]


def check_optimizer(patient: Patient) -> list[Outcome]:
    """Weights, second moments and counts after one step from several states."""
    config, worst = patient.config, 0.0
    wrong: dict[str, tuple[float, int]] = {}
    tokens, weights = batch(config, 5), lively(config, 5)
    for count, square in _STATES:
        patient.fill(weights)
        _set_state(patient, count, square)
        patient.train(tokens, _RATE)
        kinds = ("weights", "exp_avg", "exp_avg_sq", "updates")
        after = {kind: patient.whole(kind) for kind in kinds}
        for name in after["weights"]:
            found = {kind: values[name].astype(np.float64) for kind, values in after.items()}
            for part, gap in _judge(config, weights[name], found, count, square):
                worst = max(worst, gap)
                if not gap <= 1:
                    wrong.setdefault(f"{name} {part}", (gap, count + 1))
    if not patient.leads:
        return []
    ranked = sorted(wrong.items(), key=lambda item: -item[1][0])
    told = [f"{part} at update {number}, {gap:.1f} times" for part, (gap, number) in ranked]
    more = f" and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
    return [
        judged(
            "optimizer",
            [Culprit(part, "update") for part, _ in ranked],
            f"updates are those of torch.optim.AdamW to {worst:.2f} of the tolerance",
            f"beyond the tolerance of torch.optim.AdamW: {'; '.join(told[:_SHOWN])}{more}",
            largest=worst,
        )
    ]


def check_schedule(patient: Patient) -> list[Outcome]:
    """Every rate of the schedule, shortened, is that of torch's scheduler of the same name."""
    peak, schedule = patient.config.optimizer.lr, _shortened(patient.config.schedule)
    theirs = _rates(schedule, peak)
    if theirs is None:
        name = schedule.name.value
        return [not_applicable("schedule", f"torch has no scheduler like schedule={name}")]
    gaps = [abs(learning_rate(i, schedule, peak) - rate) / peak for i, rate in enumerate(theirs)]
    bad = [i for i, gap in enumerate(gaps) if not gap <= 1e-6]
    first = bad[0] if bad else 0
    return [
        judged(
            "schedule",
            [Culprit(f"rate of step {first}", "schedule")] if bad else [],
            f"{len(gaps)} rates of schedule={schedule.name.value} are torch's to {max(gaps):.1e}",
            f"{len(bad)} of {len(gaps)} rates differ, first at step {first}: "
            f"{learning_rate(first, schedule, peak):.6g}, and torch's is {theirs[first]:.6g}",
            largest=max(gaps),
        )
    ]


@torch.no_grad()
def _set_state(patient: Patient, count: int, square: float) -> None:
    values = {"exp_avg": 0.0, "exp_avg_sq": square, "updates": float(count)}
    for chunk in patient.engine.chunks():
        kind = chunk.name.partition("/")[0]
        if kind in values:
            chunk.tensor.fill_(values[kind])


def _judge(
    config: Config, weight: NDArray[np.float32], found: dict[str, Array], count: int, square: float
) -> Iterator[tuple[str, float]]:
    """Each part of an update of a parameter, and its largest error by the tolerance."""
    settings, before = config.optimizer, weight.astype(np.float64)
    gradient = found["exp_avg"] / (1 - settings.beta1)
    decays = settings.decay_norms or before.ndim > 1
    expected, squares = _torchs(config, before, gradient, count, square, decays)
    unit = precise.unit(config.precision.optimizer_state)
    spacing = np.abs(expected) * 2.0 ** (-7 if _narrow(config) else -22)
    gap = np.abs(found["weights"] - expected) / (spacing + _RATE * (8 * unit + 2.0**-13))
    yield "weights", float(gap.max())
    if decays and settings.weight_decay:
        slope = ((found["weights"] - expected) * before).sum() / (before * before).sum() / _RATE
        chance = 4 * np.sqrt((spacing**2).sum() / (before * before).sum() / before.size) / _RATE
        yield "weight decay", float(abs(slope) / (settings.weight_decay / 4 + chance))
    allowed = squares * 8 * unit + 1e-20
    yield "exp_avg_sq", float((np.abs(found["exp_avg_sq"] - squares) / allowed).max())
    yield "updates", float(abs(found["updates"] - count - 1) * 2)


def _torchs(
    config: Config, before: Array, gradient: Array, count: int, square: float, decays: bool
) -> tuple[Array, Array]:
    """Weights and second moments as torch's plain AdamW leaves them."""
    weight = torch.from_numpy(before.copy()).requires_grad_()
    weight.grad = torch.from_numpy(gradient)
    settings = config.optimizer
    adamw = torch.optim.AdamW(
        [weight],
        lr=_RATE,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay if decays else 0.0,
        foreach=False,
        fused=False,
    )
    adamw.state[weight] = {
        "step": torch.tensor(float(count)),
        "exp_avg": torch.zeros_like(weight),
        "exp_avg_sq": torch.full_like(weight, square, requires_grad=False),
    }
    adamw.step()
    return weight.detach().numpy(), adamw.state[weight]["exp_avg_sq"].numpy()


def _narrow(config: Config) -> bool:
    return (config.precision.master_weights or config.precision.weights) is Dtype.bf16


def _shortened(schedule: Schedule) -> Schedule:
    """The same shape over few steps."""
    total = min(schedule.total_steps, _TOTAL)
    warmup = min(schedule.warmup_steps, total // 10 if schedule.total_steps > total else _WARMUP)
    decay = None if schedule.decay_steps is None else min(schedule.decay_steps, total // 5)
    return replace(schedule, total_steps=total, warmup_steps=warmup, decay_steps=decay)


def _rates(schedule: Schedule, peak: float) -> list[float] | None:
    """What torch's own schedulers make of a schedule."""
    floor, warmup, total = schedule.min_lr_ratio or 0.0, schedule.warmup_steps, schedule.total_steps
    decay = total - warmup
    weight = torch.zeros((), requires_grad=True)
    optimizer: Any = torch.optim.SGD([weight], lr=peak)
    shapes: dict[Shape, Any] = {
        Shape.constant: lambda: lr_scheduler.ConstantLR(optimizer, 1.0, 1),
        Shape.cosine: lambda: lr_scheduler.CosineAnnealingLR(optimizer, decay, peak * floor),
        Shape.hlat: lambda: lr_scheduler.CosineAnnealingLR(optimizer, decay, 0.0),
        Shape.linear: lambda: lr_scheduler.LinearLR(optimizer, 1.0, floor, decay),
    }
    if schedule.name not in shapes:
        return None
    begun = schedule.name is not Shape.hlat
    rates = [peak * (step + begun) / warmup for step in range(warmup)]
    scheduler = shapes[schedule.name]()
    for _ in range(decay):
        rate = scheduler.get_last_lr()[0]
        rates.append(max(rate, peak * floor) if schedule.name is Shape.hlat else rate)
        optimizer.step()
        scheduler.step()
    return rates
