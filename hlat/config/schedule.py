"""Learning-rate schedule."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from hlat.config.bounds import bounded
from hlat.config.components import register_component

RELATIVE_FIELDS = ("tokens_per_parameter", "training_flops", "warmup_fraction")
"""Fields of ScheduleConfig that are replaced by steps when a configuration is composed."""


@dataclass(frozen=True)
class ScheduleSpec:
    """Specification of a shape after the linear warm-up (formulas: hlat.optim.lr_schedule)."""

    fields: frozenset[str] = frozenset({"min_lr_ratio"})
    """Optional fields of ScheduleConfig that the shape uses."""
    warmup_starts_at_zero: bool = False
    """True if the first step of the warm-up has rate 0."""


@dataclass
class PowerConfig:
    """Power law of the step, limited to the peak (arXiv 2408.13359)."""

    exponent: float = bounded(-0.51, min=-2, below=0)
    """Power of the step; -0.51 is fitted in the paper."""
    start_step: int = bounded(1000, min=1)
    """Step until which the rate is the peak. With the paper's min(peak, a x batch x tokens^b) it is
    (peak / (a x batch))^(1/b) / tokens per step."""


@dataclass
class ScheduleConfig:
    """Warm-up, decay and minimum learning rate; independent of run.steps."""

    name: str = MISSING
    """Shape after the warm-up: constant, cosine, hlat, inverse_sqrt, linear, power, wsd, or one of
    an extension."""
    warmup_steps: int = bounded(min=0)
    """Steps of linear warm-up."""
    total_steps: int = bounded(min=1)
    """Last step of the decay, and the length of the run unless run.steps or the tokens of the phase
    end it earlier."""
    tokens_per_parameter: float | None = bounded(None, above=0, below=float("inf"))
    """Training tokens divided by the parameters of the model, with embeddings; total_steps follows
    from it when a configuration is composed, and a run records total_steps. null: total_steps."""
    training_flops: float | None = bounded(None, above=0, below=float("inf"))
    """The same with the FLOPs of the run, tokens x FLOPs of a token of the specification."""
    warmup_fraction: float | None = bounded(None, min=0, below=1)
    """Warm-up as a fraction of total_steps, instead of warmup_steps; null: warmup_steps."""
    min_lr_ratio: float | None = bounded(0.1, min=0, max=1)
    """Minimum learning rate as a fraction of the peak; null for shapes without decay (constant)."""
    decay_steps: int | None = bounded(None, min=1)
    """Steps of decay before total_steps (power, wsd); null for the other shapes."""
    power: PowerConfig = field(default_factory=PowerConfig)
    """Settings of schedule.name=power."""


for _name, _summary, _spec, _settings in (
    ("constant", "The peak.", ScheduleSpec(frozenset()), None),
    ("cosine", "Half a cosine from the peak to min_lr_ratio at total_steps.", ScheduleSpec(), None),
    (
        "hlat",
        "Half a cosine from the peak to zero at total_steps, clamped at min_lr_ratio (HLAT's "
        "released scheduler.py).",
        ScheduleSpec(warmup_starts_at_zero=True),
        None,
    ),
    (
        "inverse_sqrt",
        "The peak times the square root of warmup_steps over the step, at least min_lr_ratio.",
        ScheduleSpec(),
        None,
    ),
    (
        "linear",
        "A straight line from the peak to min_lr_ratio at total_steps.",
        ScheduleSpec(),
        None,
    ),
    (
        "power",
        "A power of the step, at most the peak, then a line to min_lr_ratio of it over the last "
        "decay_steps.",
        ScheduleSpec(frozenset({"min_lr_ratio", "decay_steps"})),
        PowerConfig,
    ),
    (
        "wsd",
        "Warm-up, stable, decay: the peak, then one minus a square root to min_lr_ratio over the "
        "last decay_steps.",
        ScheduleSpec(frozenset({"min_lr_ratio", "decay_steps"})),
        None,
    ),
):
    register_component("schedule", _name, _summary, _spec, _settings)
