"""Interface of an optimizer's specification, without torch.

An optimizer consists of a specification and an update rule (hlat.optim.update_rule). Engines,
planner, checkpoint store and doctor query the specification and contain no name of an optimizer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hlat.config.components import get_spec
from hlat.config.precision import Dtype, PrecisionConfig
from hlat.model.parameter_spec import ModuleParameter, ParameterRole, ParameterSpec

if TYPE_CHECKING:
    from hlat.config.optimizer import OptimizerConfig
    from hlat.config.run import Config


@dataclass(frozen=True)
class StateTensor:
    """A tensor of the optimizer's state.

    Attributes:
        name: Name in checkpoints, where `<name>/<parameter>` is a tensor.
        decay: Setting by which an update with a gradient of zero multiplies the tensor; None: such
            an update is not a product with a setting.
        is_squared: True if the tensor averages squared gradients, and is never negative.
        is_weights: True if the tensor is initially equal to the weights; others are zero.
        is_average: True if the tensor averages the weights, and can be evaluated in their place.
        is_gram: True if the tensor averages products of a matrix and its transpose.
        is_basis: True if the columns of the tensor are an orthonormal basis.
        dtype: dtype in every precision recipe; None: `precision.optimizer_state_dtype`.
    """

    name: str
    decay: str | None
    is_squared: bool = False
    is_weights: bool = False
    is_average: bool = False
    is_gram: bool = False
    is_basis: bool = False
    dtype: Dtype | None = None

    def get_dtype(self, precision: PrecisionConfig) -> Dtype:
        """Return the dtype in a precision recipe."""
        return self.dtype or precision.optimizer_state_dtype


EMA = StateTensor("ema", None, is_weights=True, is_average=True, dtype=Dtype.fp32)
"""Exponential moving average of the weights, with any optimizer.

It is fp32 in every recipe. Its update with a decay of 0.999 is a thousandth of the distance to the
weights, which rounding to nearest in bf16 always loses near the weights.
"""
EMA_UPDATE_FLOPS = 3.0
"""FLOPs of the update of the moving average per element."""


class OptimizerSpec(Protocol):
    """Specification of an optimizer; methods that are not abstract describe an element-wise update.

    Attributes:
        title: Name in messages.
        nxdt_names: Values of model.optim.name in configurations of NxDT.
        num_initial_updates: Updates that initialize the state of whole matrices. They only decay
            the weights, and the state has no multiple of the gradient.
    """

    title: str
    nxdt_names: tuple[str, ...] = ()
    num_initial_updates: int = 0

    @abstractmethod
    def list_state_tensors(self, role: ParameterRole) -> tuple[StateTensor, ...]:
        """Return the state of a parameter, besides its number of updates."""

    def compute_state_shapes(
        self, settings: OptimizerConfig, role: ParameterRole, shape: tuple[int, ...]
    ) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the state of a parameter, by name in the order of the state.

        Element-wise updates need the shape of the parameter. The state of a whole matrix may have
        other shapes, and lack tensors of `list_state_tensors`.
        """
        return {tensor.name: shape for tensor in self.list_state_tensors(role)}

    @abstractmethod
    def get_update_flops(self, role: ParameterRole) -> float:
        """Return the FLOPs of an update per element of a parameter, without matmuls.

        An element-wise operation is one FLOP. The planner derives the bytes of an update from the
        state tensors and the dtypes of the precision recipe.
        """

    def count_matmul_flops(
        self, settings: OptimizerConfig, role: ParameterRole, shape: tuple[int, ...]
    ) -> float:
        """Return the FLOPs of the matmuls in the update of a whole matrix."""
        return 0.0

    def is_elementwise(self, role: ParameterRole) -> bool:
        """Return True if any shard of a parameter can be updated, False if it must be whole.

        One of the ranks that share a matrix has its state, and updates it.
        """
        return True

    def joins_heads(self, settings: OptimizerConfig) -> bool:
        """Return True if q, k and v of a layer are updated as one matrix with the rows of all.

        Each row of their state must depend on one row of the matrix.
        """
        return False

    def get_lr_factor(self, settings: OptimizerConfig, role: ParameterRole) -> float:
        """Return the learning rate of a parameter relative to that of the schedule."""
        return 1.0

    def get_lr_width_exponent(self, settings: OptimizerConfig, role: ParameterRole) -> float:
        """Return the power of the width to which the rate of a hidden matrix is proportional.

        It applies to parametrizations other than standard. Updates with elements of the same size
        at each width need -1 (muP for Adam, arXiv 2203.03466, table 8).
        """
        return -1.0

    def get_weight_decay(self, settings: OptimizerConfig, role: ParameterRole) -> float:
        """Return the decoupled weight decay of a parameter, a factor of the learning rate."""
        is_vector = role in (ParameterRole.norm, ParameterRole.bias, ParameterRole.sink)
        return 0.0 if is_vector and not settings.decay_norms else settings.weight_decay

    def build_hyperparameters(
        self, settings: OptimizerConfig, role: ParameterRole
    ) -> dict[str, Any]:
        """Return what the update rule reads from a parameter group besides `weight_decay`."""
        return {}

    def get_matrix_scale(self, settings: OptimizerConfig, shape: tuple[int, ...]) -> float:
        """Return the factor of the update of a whole matrix."""
        return 1.0

    def get_matrix_update_dtype(self, settings: OptimizerConfig) -> Dtype:
        """Return the dtype of the update of a whole matrix."""
        return Dtype.fp32

    def find_conflicts(self, config: Config) -> Iterable[str]:
        """Return an error message for each setting of a run that the optimizer does not support."""
        return ()

    @abstractmethod
    def get_gradient_source(
        self, settings: OptimizerConfig, role: ParameterRole
    ) -> tuple[str, float] | None:
        """Return the state tensor that is a multiple of the gradient after an update from zero.

        The update follows `num_initial_updates`. The second value is the factor. The doctor derives
        gradients from checkpoints with it, and from those of the default optimizer if it is None.
        """


def get_optimizer_spec(name: str) -> OptimizerSpec:
    """Return the specification of an optimizer, given optimizer.name.

    Raises:
        ConfigError: There is no optimizer with this name.
    """
    spec: OptimizerSpec = get_spec("optimizer", name)
    return spec


def group_matrices(
    settings: OptimizerConfig, parameters: Iterable[ModuleParameter]
) -> list[tuple[ParameterSpec, ...]]:
    """Return the matrices that are updated as a whole, each as the parameters of its rows."""
    optimizer, groups = get_optimizer_spec(settings.name), list[tuple[ParameterSpec, ...]]()
    for parameter in parameters:
        specs = [spec for spec in parameter.specs if not optimizer.is_elementwise(spec.role)]
        has_heads = all(spec.rows_per_head > 1 for spec in specs)  # q, k and v, not gate and up
        if specs and has_heads and optimizer.joins_heads(settings):
            groups.append(tuple(specs))
        else:
            groups += [(spec,) for spec in specs]
    return groups


def compute_joint_shape(specs: Sequence[ParameterSpec]) -> tuple[int, int]:
    """Return the shape of the matrix with the rows of all parameters."""
    return sum(spec.shape[0] for spec in specs), specs[0].shape[1]


def list_state_names(spec: OptimizerSpec) -> list[str]:
    """Return the names of the state tensors of parameters of any role."""
    names = (tensor.name for role in ParameterRole for tensor in spec.list_state_tensors(role))
    return list(dict.fromkeys(names))


def compute_saved_shapes(
    settings: OptimizerConfig, role: ParameterRole, shape: tuple[int, ...]
) -> dict[StateTensor, tuple[int, ...]]:
    """Return the state tensors of a parameter in checkpoints, and their shapes.

    They are the state of the optimizer, and the moving average of the weights if there is one.
    """
    optimizer = get_optimizer_spec(settings.name)
    shapes = optimizer.compute_state_shapes(settings, role, shape)
    tensors = {one.name: one for one in optimizer.list_state_tensors(role)}
    average = {} if settings.ema_decay is None else {EMA: shape}
    return {tensors[name]: one for name, one in shapes.items()} | average


def list_weight_copies(settings: OptimizerConfig, parameters: Iterable[ParameterSpec]) -> set[str]:
    """Return the names `<key>/<parameter>` of the state tensors that start as the weights."""
    return {
        f"{tensor.name}/{parameter.name}"
        for parameter in parameters
        for tensor in compute_saved_shapes(settings, parameter.role, parameter.shape)
        if tensor.is_weights
    }


def find_average(settings: OptimizerConfig) -> StateTensor | None:
    """Return the state tensor that averages the weights; None: there is none."""
    tensors = get_optimizer_spec(settings.name).list_state_tensors(ParameterRole.embedding)
    average = None if settings.ema_decay is None else EMA
    return next((tensor for tensor in tensors if tensor.is_average), average)
