"""Specification and settings of SOAP, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hlat.config.bounds import bounded
from hlat.config.components import register_component
from hlat.config.precision import Dtype
from hlat.model.parameter_spec import ParameterRole
from hlat.optim.adamw_spec import AdamWSpec
from hlat.optim.optimizer_spec import StateTensor

if TYPE_CHECKING:
    from hlat.config.optimizer import OptimizerConfig

NAME = "soap"
"""Value of optimizer.name."""
SIDES = ("left", "right")
"""Preconditioners of rows and columns, in the order of the dimensions."""


@dataclass
class SoapConfig:
    """SOAP of the matrices in decoder layers; AdamW updates all other parameters."""

    preconditioner_beta: float = bounded(0.95, min=0, below=1)
    """Decay of the preconditioners."""
    precondition_frequency: int = bounded(10, min=1)
    """Updates between two computations of the eigenbases."""
    max_preconditioner_dim: int = bounded(10000, min=1)
    """Largest dimension with a preconditioner; a larger one has the identity as its eigenbasis."""


class SoapSpec(AdamWSpec):
    """Adam in the eigenbases of Shampoo's preconditioners, and AdamW for the other parameters.

    The first update of a matrix computes the eigenbases only (arXiv 2409.11321, algorithm 3, and
    https://github.com/nikhilvyas/SOAP): in the eigenbases of one gradient, the gradient is
    diagonal, and the update would divide rounding errors by their size.
    """

    title = "SOAP"
    nxdt_names = ()
    num_initial_updates = 1

    def is_elementwise(self, role: ParameterRole) -> bool:
        """Return False for the matrices of decoder layers."""
        return role not in (ParameterRole.matrix, ParameterRole.residual)

    def list_state_tensors(self, role: ParameterRole) -> tuple[StateTensor, ...]:
        """Return the moments of a matrix, the second one in the eigenbases, and L, R, Q_L, Q_R.

        Preconditioners and eigenbases are fp32 in every recipe. Rounded to bf16, columns of an
        eigenbasis are not orthogonal to 1%, and eigenvalues below 1% of the largest one are lost.
        """
        if self.is_elementwise(role):
            return super().list_state_tensors(role)
        decay, fp32 = f"{NAME}.preconditioner_beta", Dtype.fp32
        return (
            StateTensor("exp_avg", "beta1"),
            StateTensor("rotated_exp_avg_sq", None, is_squared=True),
            *(StateTensor(f"{side}_gram", decay, is_gram=True, dtype=fp32) for side in SIDES),
            *(StateTensor(f"{side}_basis", None, is_basis=True, dtype=fp32) for side in SIDES),
        )

    def compute_state_shapes(
        self, settings: OptimizerConfig, role: ParameterRole, shape: tuple[int, ...]
    ) -> dict[str, tuple[int, ...]]:
        """Return square shapes for preconditioners and eigenbases of dimensions that have them."""
        shapes = super().compute_state_shapes(settings, role, shape)
        if self.is_elementwise(role):
            return shapes
        for side, dim in zip(SIDES, shape, strict=True):
            for key in (f"{side}_gram", f"{side}_basis"):
                shapes[key] = (dim, dim)
                if dim > settings.soap.max_preconditioner_dim:
                    del shapes[key]
        return shapes

    def get_update_flops(self, role: ParameterRole) -> float:
        """Return 3 and 4 for the moments, 4 for the quotient, 1 for decay and 2 for the step."""
        return 14

    def count_matmul_flops(
        self, settings: OptimizerConfig, role: ParameterRole, shape: tuple[int, ...]
    ) -> float:
        """Return those of gradient, average and update with the eigenbases, and of L and R.

        The eigenbases need a matmul and a QR decomposition, 4/3 n^3 each for R and Q, in one of
        `precondition_frequency` updates.
        """
        if self.is_elementwise(role):
            return 0.0
        soap, (num_rows, num_columns) = settings.soap, shape
        dims = [dim for dim in shape if dim <= soap.max_preconditioner_dim]
        matmuls = sum(4 * 2 * dim * num_rows * num_columns for dim in dims)
        bases = sum((2 + 8 / 3) * dim**3 for dim in dims)
        return matmuls + bases / soap.precondition_frequency

    def build_hyperparameters(
        self, settings: OptimizerConfig, role: ParameterRole
    ) -> dict[str, Any]:
        """Return the arguments of the update rule."""
        arguments = super().build_hyperparameters(settings, role)
        if self.is_elementwise(role):
            return arguments
        soap = settings.soap
        return arguments | {
            "preconditioner_beta": soap.preconditioner_beta,
            "precondition_frequency": soap.precondition_frequency,
        }


register_component(
    "optimizer",
    NAME,
    "Adam in the eigenbases of Shampoo (SOAP); AdamW for other parameters.",
    SoapSpec(),
    SoapConfig,
)
