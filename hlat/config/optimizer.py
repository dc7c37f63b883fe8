"""Optimizer and gradient clipping."""

from dataclasses import dataclass, field
from typing import Any

from hlat.config.bounds import bounded
from hlat.optim import adamw_spec
from hlat.optim import lion_spec as lion_spec  # registers its specification
from hlat.optim.ademamix_spec import AdEMAMixConfig
from hlat.optim.muon_spec import MuonConfig
from hlat.optim.normuon_spec import NorMuonConfig
from hlat.optim.schedule_free_spec import ScheduleFreeConfig
from hlat.optim.soap_spec import SoapConfig

RENAMED_PRESETS = {name: f"adamw_{name}" for name in ("tiny", "small", "1b", "hlat_7b", "hlat_70b")}
"""Presets of conf/optimizer by their former names."""


def _bounded_lr() -> Any:
    return bounded(None, above=0, below=float("inf"))


@dataclass
class RoleLearningRates:
    """Peak learning rates by role of parameters; null: that of the optimizer."""

    matrix: float | None = _bounded_lr()
    """Matrices of decoder layers, except residual."""
    residual: float | None = _bounded_lr()
    """Matrices that write to the residual stream: o_proj, down_proj."""
    embedding: float | None = _bounded_lr()
    """Token embedding."""
    head: float | None = _bounded_lr()
    """Output head."""
    norm: float | None = _bounded_lr()
    """Weights of norms."""
    bias: float | None = _bounded_lr()
    """Biases of linear layers."""
    sink: float | None = _bounded_lr()
    """Attention sinks."""
    router: float | None = _bounded_lr()
    """Routers of mixtures of experts."""


@dataclass
class OptimizerConfig:
    """Optimizer; the default values are those of HLAT's AdamW (paper, section III-A)."""

    name: str = adamw_spec.NAME
    """Update rule: adamw, ademamix, lion, muon, normuon, schedule_free, soap, or one of an
    extension."""
    lr: float = bounded(above=0, below=float("inf"))
    """Peak learning rate."""
    lr_by_role: RoleLearningRates = field(default_factory=RoleLearningRates)
    """Peak learning rates of parameters by their role."""
    beta1: float = bounded(0.9, min=0, below=1)
    """Decay of the first moment."""
    beta2: float = bounded(0.95, min=0, below=1)
    """Decay of the second moment."""
    eps: float = bounded(1e-8, above=0)
    """Added to the root of the second moment."""
    weight_decay: float = bounded(0.1, min=0)
    """Decoupled decay, times the learning rate."""
    decay_norms: bool = True
    """Apply weight decay to the weights of norms, as HLAT does; most other recipes do not."""
    grad_clip: float = bounded(1.0, min=0)
    """Largest global gradient norm; 0: no clipping."""
    ema_decay: float | None = bounded(None, min=0, below=1)
    """Decay of an exponential moving average of the weights in each step, for example 0.999. It is
    evaluated besides the weights; null: no average."""
    ademamix: AdEMAMixConfig = field(default_factory=AdEMAMixConfig)
    """Settings of optimizer.name=ademamix."""
    muon: MuonConfig = field(default_factory=MuonConfig)
    """Settings of optimizer.name=muon."""
    normuon: NorMuonConfig = field(default_factory=NorMuonConfig)
    """Settings of optimizer.name=normuon."""
    schedule_free: ScheduleFreeConfig = field(default_factory=ScheduleFreeConfig)
    """Settings of optimizer.name=schedule_free."""
    soap: SoapConfig = field(default_factory=SoapConfig)
    """Settings of optimizer.name=soap."""
