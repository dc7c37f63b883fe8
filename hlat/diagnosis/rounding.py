"""Whether small updates of the weights arrive, on average, and push them nowhere else.

An update below half the spacing of bf16 is lost if it is rounded to nearest, and
arrives on average if it is rounded stochastically. The moments that are kept tell what each update
was to be.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hlat.config.precision import Dtype, Rounding
from hlat.config.run import Config
from hlat.diagnosis.patient import Patient, Whole, batch, lively
from hlat.diagnosis.verdict import Culprit, Outcome, judged

_STEPS = 6
_RATE = 2.0**-14
"""A sixteenth of the spacing of bf16 at 1/8, where most of the weights are."""
_SIGMAS = 6
_SLACK = 0.01
"""Of the moments' own roundings."""

Array = NDArray[np.float64]


@dataclass
class _Sums:
    """Over all elements and steps; what chance does to each of the first three is squared."""

    kept: float = 0.0
    asked: float = 0.0
    kept_variance: float = 0.0
    outward: float = 0.0
    upward: float = 0.0
    drift_variance: float = 0.0
    count: int = 0


def check_rounding(patient: Patient) -> list[Outcome]:
    """The share of many small updates that the weights keep, and their drift."""
    config = patient.config
    patient.fill(lively(config))
    patient.forget()
    tokens, sums = batch(config), _Sums()
    before = patient.whole("weights")
    for _ in range(_STEPS):
        patient.train(tokens, _RATE)
        after = patient.whole("weights")
        moments = patient.whole("exp_avg"), patient.whole("exp_avg_sq"), patient.whole("updates")
        for name in after:
            _add(sums, config, name, before, after, moments)
        before = after
    if not patient.leads:
        return []
    return [_judge(config, sums)]


def _add(
    sums: _Sums,
    config: Config,
    name: str,
    before: Whole,
    after: Whole,
    moments: tuple[Whole, Whole, Whole],
) -> None:
    """Add one step of one parameter."""
    weight = before[name].astype(np.float64)
    if weight.ndim < 2:
        return  # norms, around one, where nothing of such an update arrives for long
    asked = _asked(config, weight, *(kind[name].astype(np.float64) for kind in moments))
    spacing = _spacing(config, weight)
    small = np.abs(asked) < spacing / 2 if _kept(config) is Dtype.bf16 else slice(None)
    weight, asked, spacing = weight[small], asked[small], spacing[small]
    change = after[name].astype(np.float64)[small] - weight
    share = np.minimum(np.abs(asked) / spacing, 1)
    chance = share * (1 - share)
    sums.kept += float((change * asked).sum())
    sums.asked += float((asked * asked).sum())
    sums.kept_variance += float((asked**2 * spacing**2 * chance).sum())
    surplus = (change - asked) / spacing
    sums.outward += float((surplus * np.sign(weight)).sum())
    sums.upward += float(surplus.sum())
    sums.drift_variance += float(chance.sum())
    sums.count += weight.size


def _asked(config: Config, weight: Array, average: Array, square: Array, count: Array) -> Array:
    """The update that the moments, as they are kept, ask for (arXiv 1711.05101, algorithm 2)."""
    settings, number = config.optimizer, float(count)
    ratio = (average / (1 - settings.beta1**number)) / (
        np.sqrt(square / (1 - settings.beta2**number)) + settings.eps
    )
    asked: Array = -_RATE * (ratio + settings.weight_decay * weight)
    return asked


def _spacing(config: Config, weight: Array) -> Array:
    """The distance of the two values between which an updated weight is rounded."""
    digits = 23 if _kept(config) is Dtype.fp32 else 7
    spacing: Array = np.exp2(np.floor(np.log2(np.maximum(np.abs(weight), 1e-30))) - digits)
    return spacing


def _kept(config: Config) -> Dtype:
    """The dtype of what is updated."""
    return config.precision.master_weights or config.precision.weights


def _judge(config: Config, sums: _Sums) -> Outcome:
    kept = sums.kept / sums.asked
    error = np.sqrt(sums.kept_variance) / sums.asked
    outward, upward = sums.outward / sums.count, sums.upward / sums.count
    drift, allowed = max(abs(outward), abs(upward)), _SIGMAS * np.sqrt(sums.drift_variance)
    tolerance, most = _SIGMAS * float(error) + _SLACK, float(allowed) / sums.count + 1e-3
    numbers = {"kept": kept, "tolerance": tolerance, "drift": drift, "drift_tolerance": most}
    if _kept(config) is Dtype.bf16 and config.precision.rounding is Rounding.nearest:
        said = (
            f"{kept:.1%} of small updates arrive: precision={config.precision.name} rounds bf16 to "
            "nearest and loses the rest, as it must; bf16_sr and mixed keep them"
        )
        return judged("rounding", [], said, said, **numbers)
    wrong, narrow = [], _kept(config) is Dtype.bf16
    if not abs(kept - 1) <= tolerance:
        wrong.append(Culprit("share of small updates that arrives", "rounding"))
    if narrow and not drift <= most:
        wrong.append(Culprit("drift of the weights", "rounding"))
    return judged(
        "rounding",
        wrong,
        f"{kept:.1%} of small updates arrive (chance: {tolerance:.1%})"
        + (f", weights drift by {drift:.1e} spacings a step" if narrow else ""),
        f"{kept:.1%} of small updates arrive (100% within {tolerance:.1%}), and weights drift by "
        f"{drift:.1e} spacings a step (at most {most:.1e})",
        **numbers,
    )
