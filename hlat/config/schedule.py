"""Learning-rate schedule."""

from dataclasses import dataclass

from omegaconf import MISSING

from hlat.config.bounds import bounded
from hlat.config.components import register_component


@dataclass(frozen=True)
class ScheduleSpec:
    """Specification of a shape after the linear warm-up (formulas: hlat.optim.lr_schedule)."""

    fields: frozenset[str] = frozenset({"min_lr_ratio"})
    """Optional fields of ScheduleConfig that the shape uses."""
    warmup_starts_at_zero: bool = False
    """True if the first step of the warm-up has rate 0."""


@dataclass
class ScheduleConfig:
    """Warm-up, decay and minimum learning rate; independent of run.steps."""

    name: str = MISSING
    """Shape after the warm-up: constant, cosine, hlat, linear, wsd, or one of an extension."""
    warmup_steps: int = bounded(min=0)
    """Steps of linear warm-up."""
    total_steps: int = bounded(min=1)
    """Last step of the decay, and the length of the run unless run.steps or the tokens of the phase
    end it earlier."""
    min_lr_ratio: float | None = bounded(0.1, min=0, max=1)
    """Minimum learning rate as a fraction of the peak; null for shapes without decay (constant)."""
    decay_steps: int | None = bounded(None, min=1)
    """Steps of decay before total_steps (wsd); null for the other shapes."""


for _name, _summary, _spec in (
    ("constant", "The peak.", ScheduleSpec(frozenset())),
    ("cosine", "Half a cosine from the peak to min_lr_ratio at total_steps.", ScheduleSpec()),
    (
        "hlat",
        "Half a cosine from the peak to zero at total_steps, clamped at min_lr_ratio (HLAT's "
        "released scheduler.py).",
        ScheduleSpec(warmup_starts_at_zero=True),
    ),
    (
        "linear",
        "A straight line from the peak to min_lr_ratio at total_steps.",
        ScheduleSpec(),
    ),
    (
        "wsd",
        "Warm-up, stable, decay: the peak, then one minus a square root to min_lr_ratio over the "
        "last decay_steps.",
        ScheduleSpec(frozenset({"min_lr_ratio", "decay_steps"})),
    ),
):
    register_component("schedule", _name, _summary, _spec)
