"""Specification and settings of NorMuon, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hlat.config.bounds import bounded
from hlat.config.components import register_component
from hlat.model.parameter_spec import ParameterRole
from hlat.optim.muon_spec import MuonConfig, MuonSpec
from hlat.optim.optimizer_spec import StateTensor

if TYPE_CHECKING:
    from hlat.config.optimizer import OptimizerConfig

NAME = "normuon"
"""Value of optimizer.name."""


@dataclass
class NorMuonConfig(MuonConfig):
    """NorMuon of the matrices in decoder layers; AdamW updates all other parameters."""

    beta2: float = bounded(0.95, min=0, below=1)
    """Decay of the mean square of each row of the orthogonalized matrix."""


class NorMuonSpec(MuonSpec):
    """Muon with rows of equal size: each is divided by its root mean square over steps."""

    title = "NorMuon"
    section = NAME

    def list_state_tensors(self, role: ParameterRole) -> tuple[StateTensor, ...]:
        """Return those of Muon and the second moment, named as in the authors' code."""
        tensors = super().list_state_tensors(role)
        if self.is_elementwise(role):
            return tensors
        return *tensors, StateTensor("second_momentum_buffer", None, is_squared=True)

    def compute_state_shapes(
        self, settings: OptimizerConfig, role: ParameterRole, shape: tuple[int, ...]
    ) -> dict[str, tuple[int, ...]]:
        """Return one value per row for the second moment."""
        shapes = super().compute_state_shapes(settings, role, shape)
        return (
            shapes
            if self.is_elementwise(role)
            else shapes | {"second_momentum_buffer": (shape[0], 1)}
        )

    def get_update_flops(self, role: ParameterRole) -> float:
        """Return 2 for each of the mean square and both norms, and 2 for the scales, besides."""
        return super().get_update_flops(role) + (0 if self.is_elementwise(role) else 8)

    def build_hyperparameters(
        self, settings: OptimizerConfig, role: ParameterRole
    ) -> dict[str, Any]:
        """Return the arguments of the update rule."""
        arguments = super().build_hyperparameters(settings, role)
        if self.is_elementwise(role):
            return arguments
        own = settings.normuon
        return arguments | {"beta2": own.beta2, "scale": own.scale}


register_component(
    "optimizer",
    NAME,
    "Muon with rows of equal size (NorMuon); AdamW for other parameters.",
    NorMuonSpec(),
    NorMuonConfig,
)
