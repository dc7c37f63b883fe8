"""Optimizer of whole matrices, each of which one of the ranks that share it updates."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hlat.config.config_errors import ConfigError
from hlat.config.precision import PrecisionConfig
from hlat.config.run import Config
from hlat.distributed.mesh_axis import MeshAxis
from hlat.distributed.parameter_shards import ParameterShard
from hlat.distributed.state_shard import StateShard
from hlat.engine.native.matrix_exchange import MatrixExchange, MatrixSlice
from hlat.engine.native.step_rounding import StochasticRounding
from hlat.model.canonical_views import iter_row_views
from hlat.model.decoder_spec import list_module_parameters
from hlat.model.parameter_spec import ModuleParameter, ParameterSpec
from hlat.optim.eager_optimizer import EagerOptimizer
from hlat.optim.optimizer_factory import build_group_settings
from hlat.optim.optimizer_spec import compute_joint_shape, get_optimizer_spec, group_matrices
from hlat.optim.update_rule import ParamGroups, UpdateRule, store_update
from hlat.precision.random_bits import RandomBits
from hlat.precision.stochastic_rounding import StochasticRounder
from hlat.precision.torch_dtypes import TORCH_DTYPES


@dataclass(frozen=True)
class MatrixParameter:
    """Rows that this rank updates of a module parameter.

    Attributes:
        name: Name of the module parameter.
        shard: Their canonical rows and columns.
        is_main_replica: True if this rank saves them.
    """

    name: str
    shard: ParameterShard
    is_main_replica: bool


class MatrixOptimizer(EagerOptimizer):
    """Optimizer that applies `UpdateRule.compute_matrix` to canonical matrices.

    Attributes:
        found_inf: 1.0 to skip a step, 0.0 otherwise, as in torch's fused AdamW.
    """

    def __init__(
        self,
        param_groups: ParamGroups,
        rule: UpdateRule,
        params: Mapping[Tensor, MatrixParameter],
        config: Config,
        axis: MeshAxis,
        rounding: StochasticRounding | None,
        device: torch.device,
    ) -> None:
        """Create the state of the matrices that this rank owns.

        Args:
            param_groups: Parameter groups.
            rule: Update rule.
            params: Description of each parameter.
            config: Configuration of the run.
            axis: Ranks that share the matrices.
            rounding: Stochastic rounding of weights and state in bf16; None: to nearest.
            device: Device of the state.
        """
        groups = [*param_groups] or [{"params": []}]  # torch rejects a list without groups
        super().__init__(groups, {"lr": config.optimizer.lr, "lr_factor": 1.0})
        if rule.compute_matrix is None:
            raise ConfigError(
                f"optimizer.name={config.optimizer.name} updates whole matrices, so its UpdateRule "
                "needs compute_matrix"
            )
        self._step_supports_amp_scaling = True
        self.found_inf: Tensor | None = None
        self._compute, self._params, self._rounding = rule.compute_matrix, params, rounding
        self._settings, self._spec = config.optimizer, get_optimizer_spec(config.optimizer.name)
        self._model = config.model
        self._rounder = StochasticRounder()
        parameters = list_module_parameters(config.model)
        self._matrices = {
            specs[0].name: specs for specs in group_matrices(config.optimizer, parameters)
        }
        self._positions = _compute_positions(self._matrices)
        self._groups = {p: group for group in self.param_groups for p in group["params"]}
        self._count = torch.zeros((), device=device)
        for param in self._groups:
            self.state[param] = {"step": self._count}
        by_param = {param: [*self._list_slices(param, param)] for param in params}
        self._num_slices = {param: len(slices) for param, slices in by_param.items()}
        slices = [one for slices in by_param.values() for one, _ in slices]
        experts = _list_expert_names(parameters) if config.parallelism.ep > 1 else frozenset()
        self._exchange = MatrixExchange(axis, slices, self._compute_costs(), device, experts)
        self._state_by_name = {
            spec.name: self._init_state(spec, config.precision, device)
            for name in self._exchange.owned
            for spec in self._matrices[name]
        }

    def iter_state_shards(self) -> Iterator[StateShard]:
        """Yield the state of the matrices that this rank owns."""
        for name, state in self._state_by_name.items():
            for key, tensor in state.items():
                shape = tuple(tensor.shape)
                yield StateShard(f"{key}/{name}", shape, (0,) * len(shape), shape, tensor)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters, or leave all bit-identical if `found_inf` is not zero."""
        slices = [
            (param, index, view)
            for param in self._params
            for index, (_, view) in enumerate(self._list_slices(param, param.grad))
        ]
        received: dict[Tensor, dict[int, Tensor]] = {param: {} for param in self._params}
        dtype = TORCH_DTYPES[self._spec.get_matrix_update_dtype(self._settings)]
        gradients = [view for _, _, view in slices]
        for position, part in self._exchange.update(gradients, self._update_matrix, dtype):
            param, index, _ = slices[position]
            received[param][index] = part
            if len(received[param]) == self._num_slices[param]:
                self._update_param(param, received.pop(param))
        self._count += 1 if self.found_inf is None else 1 - self.found_inf

    def _update_param(self, param: Tensor, updates: Mapping[int, Tensor]) -> None:
        """Subtract the updates of all slices of a parameter from its decayed weights."""
        lr, decay = self._groups[param]["lr"], self._groups[param]["weight_decay"]
        values = param.float() * (1 - lr * decay)
        for index, (one, view) in enumerate(self._list_slices(param, values)):
            shape = compute_joint_shape(self._matrices[one.name])
            scale = self._spec.get_matrix_scale(self._settings, shape)
            view.add_(updates[index].view(view.shape), alpha=-lr * scale)
        bits = None
        if self._rounds(param):
            assert self._rounding is not None
            bits = self._rounding.get_update_bits(self._params[param].name, 1)
        self._store(param, values, bits)

    def _list_slices(
        self, param: Tensor, tensor: Tensor | None
    ) -> Iterator[tuple[MatrixSlice, Tensor]]:
        """Yield the slices of matrices in a parameter, and views of them in `tensor`."""
        assert tensor is not None
        described = self._params[param]
        shard = described.shard
        assert shard.columns is not None
        for rows, view, start in iter_row_views(shard.rows, tensor):
            is_main = described.is_main_replica and start < shard.num_owned_rows
            name, first_row = self._positions[rows.name]
            rectangle = (first_row + rows.start, rows.num_rows, *shard.columns)
            yield MatrixSlice(name, rectangle, is_main), view

    def _compute_costs(self) -> dict[str, float]:
        """Return the FLOPs of the update of each matrix."""
        return {
            name: self._spec.count_matmul_flops(
                self._settings, specs[0].role, compute_joint_shape(specs)
            )
            for name, specs in self._matrices.items()
        }

    def _init_state(
        self, spec: ParameterSpec, precision: PrecisionConfig, device: torch.device
    ) -> dict[str, Tensor]:
        """Return the state of a parameter, which is zero."""
        shapes = self._spec.compute_state_shapes(self._settings, spec.role, spec.shape)
        tensors = {tensor.name: tensor for tensor in self._spec.list_state_tensors(spec.role)}
        dtypes = {key: TORCH_DTYPES[tensors[key].get_dtype(precision)] for key in shapes}
        return {
            key: torch.zeros(shape, dtype=dtypes[key], device=device)
            for key, shape in shapes.items()
        }

    def _update_matrix(self, name: str, gradient: Tensor) -> Tensor:
        """Return the update of a matrix, and store the new state of its parameters."""
        specs = self._matrices[name]
        states = [self._state_by_name[spec.name] for spec in specs]
        settings = build_group_settings(self._settings, specs[0].role, self._model)
        keys = settings["state_names"] = [*states[0]]
        joined = [_concatenate([state[key].float() for state in states]) for key in keys]
        update, *updated = self._compute([gradient, *joined], self._count + 1, settings)
        for index, (key, tensor) in enumerate(zip(keys, updated, strict=True)):
            parts = torch.split(tensor, [len(state[key]) for state in states])
            for spec, state, part in zip(specs, states, parts, strict=True):
                self._store_state(spec.name, index, state[key], part)
        return update

    def _store_state(self, name: str, index: int, stored: Tensor, updated: Tensor) -> None:
        bits = None
        if self._rounds(stored):
            assert self._rounding is not None
            bits = self._rounding.build_matrix_bits(name, stored.shape, index, self._count)
        self._store(stored, updated, bits)

    def _rounds(self, tensor: Tensor) -> bool:
        return self._rounding is not None and tensor.dtype == torch.bfloat16

    def _store(self, stored: Tensor, updated: Tensor, bits: RandomBits | None) -> None:
        """Round an updated tensor into the stored one unless the step is skipped."""
        if bits is not None:
            buffer = self._rounder.get_buffer("matrix", 1, stored.shape, stored.device)
            buffer.tensors[0].copy_(updated)
            self._rounder.round_(buffer, bits, slice(None))
            updated = buffer.tensors[0]
        store_update([stored], [updated], self.found_inf)


def _list_expert_names(parameters: Iterable[ModuleParameter]) -> frozenset[str]:
    """Return the canonical names of the parameters of experts."""
    return frozenset(
        spec.name
        for parameter in parameters
        if parameter.expert is not None
        for spec in parameter.specs
    )


def _concatenate(tensors: list[Tensor]) -> Tensor:
    """Return the rows of all tensors, without a copy of a single one."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _compute_positions(
    matrices: Mapping[str, Sequence[ParameterSpec]],
) -> dict[str, tuple[str, int]]:
    """Return the matrix that contains each parameter, and the first row there."""
    positions = {}
    for name, specs in matrices.items():
        first_row = 0
        for spec in specs:
            positions[spec.name] = (name, first_row)
            first_row += spec.shape[0]
    return positions
