"""Specification and settings of Muon, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from hlat.config.bounds import bounded
from hlat.config.components import register_component
from hlat.config.precision import Dtype
from hlat.model.parameter_spec import ParameterRole
from hlat.optim.adamw_spec import AdamWSpec
from hlat.optim.optimizer_spec import StateTensor

if TYPE_CHECKING:
    from hlat.config.optimizer import OptimizerConfig

NAME = "muon"
"""Value of optimizer.name."""


class UpdateScale(Enum):
    """Factor of the update of a matrix [rows, columns], as adjust_lr_fn of torch.optim.Muon."""

    original = "original"
    """sqrt(max(1, rows / columns)) (Keller Jordan)."""
    match_rms_adamw = "match_rms_adamw"
    """0.2 sqrt(max(rows, columns)): the size of AdamW's updates (Moonlight, arXiv 2502.16982)."""


@dataclass
class MuonConfig:
    """Muon of the matrices in decoder layers; AdamW updates all other parameters."""

    momentum: float = bounded(0.95, min=0, below=1)
    """Decay of the averaged gradient."""
    nesterov: bool = True
    """Orthogonalize the average after one more step with the gradient."""
    num_iterations: int = bounded(5, min=1, max=20)
    """Newton-Schulz iterations."""
    iteration_dtype: Dtype = Dtype.bf16
    """dtype of the iterations: bf16, or fp32 so that results are equal in all layouts to 1e-5."""
    scale: UpdateScale = UpdateScale.match_rms_adamw
    """Factor of the update: match_rms_adamw, for learning rates of AdamW, or original."""
    joint_qkv: bool = False
    """Orthogonalize q, k and v of a layer as one matrix; gate and up are always two."""
    adamw_lr: float | None = bounded(None, above=0, below=float("inf"))
    """Peak learning rate of the parameters that AdamW updates; null: optimizer.lr."""


class MuonSpec(AdamWSpec):
    """Orthogonalized momentum of whole matrices, and AdamW for the other parameters.

    Attributes:
        section: Section of the settings in `optimizer`.
    """

    title = "Muon"
    nxdt_names = ()
    section = NAME

    def get_settings(self, settings: OptimizerConfig) -> MuonConfig:
        """Return the settings of the matrices."""
        found: MuonConfig = getattr(settings, self.section)
        return found

    def is_elementwise(self, role: ParameterRole) -> bool:
        """Return False for the matrices of decoder layers."""
        return role not in (ParameterRole.matrix, ParameterRole.residual)

    def joins_heads(self, settings: OptimizerConfig) -> bool:
        """Return the setting `joint_qkv`."""
        return self.get_settings(settings).joint_qkv

    def list_state_tensors(self, role: ParameterRole) -> tuple[StateTensor, ...]:
        """Return the averaged gradient of a matrix, named as in torch.optim.Muon."""
        if self.is_elementwise(role):
            return super().list_state_tensors(role)
        return (StateTensor("momentum_buffer", f"{self.section}.momentum"),)

    def get_update_flops(self, role: ParameterRole) -> float:
        """Return 3 for each of average and direction, 1 for decay and 2 for the step."""
        return super().get_update_flops(role) if self.is_elementwise(role) else 9

    def count_matmul_flops(
        self, settings: OptimizerConfig, role: ParameterRole, shape: tuple[int, ...]
    ) -> float:
        """Return those of the three matmuls of each iteration."""
        if self.is_elementwise(role):
            return 0.0
        short, long = min(shape), max(shape)
        return self.get_settings(settings).num_iterations * 2 * short**2 * (2 * long + short)

    def get_lr_factor(self, settings: OptimizerConfig, role: ParameterRole) -> float:
        """Return the ratio of the two learning rates."""
        lr = self.get_settings(settings).adamw_lr
        return 1.0 if lr is None or not self.is_elementwise(role) else lr / settings.lr

    def build_hyperparameters(
        self, settings: OptimizerConfig, role: ParameterRole
    ) -> dict[str, Any]:
        """Return the arguments of the update rule."""
        if self.is_elementwise(role):
            return super().build_hyperparameters(settings, role)
        muon = self.get_settings(settings)
        return {
            "momentum": muon.momentum,
            "nesterov": muon.nesterov,
            "num_iterations": muon.num_iterations,
            "iteration_dtype": muon.iteration_dtype,
        }

    def get_matrix_scale(self, settings: OptimizerConfig, shape: tuple[int, ...]) -> float:
        """Return the factor of the update."""
        num_rows, num_columns = shape
        if self.get_settings(settings).scale is UpdateScale.original:
            return math.sqrt(max(1, num_rows / num_columns))
        return 0.2 * math.sqrt(max(num_rows, num_columns))

    def get_lr_width_exponent(self, settings: OptimizerConfig, role: ParameterRole) -> float:
        """Return 0 for the scale `original`, and -1/2 for `match_rms_adamw`.

        The spectral norm of an update must be proportional to sqrt(rows / columns) (arXiv
        2310.17813, condition 1). That of an orthogonalized matrix is 1, times sqrt(width) with
        match_rms_adamw.
        """
        if self.is_elementwise(role):
            return super().get_lr_width_exponent(settings, role)
        return 0.0 if self.get_settings(settings).scale is UpdateScale.original else -0.5

    def get_matrix_update_dtype(self, settings: OptimizerConfig) -> Dtype:
        """Return the dtype of the iterations."""
        return self.get_settings(settings).iteration_dtype

    def get_gradient_source(
        self, settings: OptimizerConfig, role: ParameterRole
    ) -> tuple[str, float]:
        """Return the averaged gradient of a matrix, 1 - momentum times the gradient."""
        if self.is_elementwise(role):
            return super().get_gradient_source(settings, role)
        return "momentum_buffer", 1 - self.get_settings(settings).momentum


register_component(
    "optimizer",
    NAME,
    "Orthogonalized momentum of matrices (Muon); AdamW for other parameters.",
    MuonSpec(),
    MuonConfig,
)
