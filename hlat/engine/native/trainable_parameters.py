"""Parameters of a rank with gradients, master weights and optimizer of a precision recipe."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hlat.config.engine_capabilities import STOCHASTIC_ROUNDING_DEVICES
from hlat.config.precision import Dtype, RoundingMode
from hlat.config.run import Config
from hlat.distributed.device_mesh import ParallelMesh
from hlat.distributed.state_shard import StateShard
from hlat.engine.native.gradient_accumulation import AutogradAccumulator, GradientAccumulator
from hlat.engine.native.gradient_reduction import GradientReducer
from hlat.engine.native.matrix_optimizer import MatrixOptimizer, MatrixParameter
from hlat.engine.native.sharded_parameters import LocalParameter, ShardedParameters
from hlat.engine.native.step_rounding import NearestRounding, StochasticRounding
from hlat.optim import optimizer_factory
from hlat.optim.low_precision_optimizer import LowPrecisionOptimizer
from hlat.optim.optimizer_spec import EMA, find_average
from hlat.optim.update_rule import UpdateRule, store_update
from hlat.precision.record_range import record_range
from hlat.precision.torch_dtypes import TORCH_DTYPES


class TrainableParameters(ShardedParameters):
    """Parameters by name of decoder.Decoder with everything that a training step needs.

    The optimizer updates `optimizer_params`: master weights, or `updated_params`.
    """

    def __init__(
        self,
        local_params: Mapping[str, LocalParameter],
        config: Config,
        mesh: ParallelMesh,
        compile_backend: str | None = None,
    ) -> None:
        super().__init__(local_params, config, mesh)
        self._precision, self._compile_backend = config.precision, compile_backend
        device = next(iter(self.model_params.values())).device
        self._rounding = NearestRounding(compile_backend)
        if (
            config.precision.rounding is RoundingMode.stochastic
            and device.type not in STOCHASTIC_ROUNDING_DEVICES
        ):
            self._rounding = StochasticRounding(self, config, self._get_step_count, compile_backend)
        self._master_weights: dict[str, Tensor] = {}
        # FSDP2's parameters have the master dtype themselves
        if config.precision.master_weight_dtype is not None:
            dtype = TORCH_DTYPES[config.precision.master_weight_dtype]
            self._master_weights = {
                name: torch.empty_like(param, dtype=dtype)
                for name, param in self.updated_params.items()
                if not self.local_params[name].sharding.is_fsdp
            }
        self.optimizer_params = self.updated_params | self._master_weights
        self._ema_decay, self._average = config.optimizer.ema_decay, find_average(config.optimizer)
        self._ema: dict[str, Tensor] = {}
        if self._ema_decay is not None:
            self._ema = {
                name: torch.empty_like(param, dtype=torch.float32)
                for name, param in self.optimizer_params.items()
            }
        self._gradients = self._build_gradient_source(config, mesh)
        self._matrix_optimizer: MatrixOptimizer | None = None
        self._optimizers = self._build_optimizers(config, mesh)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        self._gradients.close()

    def get_state(self, name: str) -> dict[str, Tensor]:
        """Return (master) weights, optimizer state, average and `step`, the number of updates."""
        param = self.optimizer_params[name]
        state = next(one.state[param] for one in self._optimizers if param in one.state)
        average = {EMA.name: self._ema[name]} if self._ema else {}
        return {"weights": param, **state, **average}

    def iter_matrix_state_shards(self) -> Iterator[StateShard]:
        """Yield the optimizer state of the matrices that this rank updates as a whole."""
        if self._matrix_optimizer is not None:
            yield from self._matrix_optimizer.iter_state_shards()

    def start_step(self, num_micro_batches: int) -> None:
        """Prepare for the gradients of a number of micro batches on each data-parallel rank."""
        if isinstance(self._gradients, GradientReducer):
            self._gradients.num_micro_batches = num_micro_batches
        if isinstance(self._rounding, StochasticRounding):
            self._rounding.start_step(num_micro_batches)

    @record_range("gradient_reduction")
    def collect_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the step, summed over micro batches and ranks."""
        gradients = self._gradients.pop_gradients()
        dtype = TORCH_DTYPES[self._precision.grad_accum_dtype]
        updates = {name: gradients[name].to(dtype) for name in self.optimizer_params}
        for name, param in self.optimizer_params.items():
            param.grad = updates[name]
        return updates

    @record_range("optimizer")
    def step(self, learning_rate: float, skip: Tensor) -> None:
        """Update the parameters and clear the gradients.

        If the bool scalar `skip` is true, weights, state and step counts stay bit-identical.
        """
        for optimizer in self._optimizers:
            optimizer_factory.set_lr(optimizer, learning_rate)
            optimizer_factory.step_optimizer(optimizer, skip)
            optimizer.zero_grad(set_to_none=True)
        self._update_ema(skip)
        self.sync_model_params()

    @torch.no_grad()
    def sync_model_params(self) -> None:
        """Update the model from this rank's master weights and the rows of other ranks."""
        for name, master in self._master_weights.items():
            self._rounding.copy_(name, self.updated_params[name], master)
        super().sync_model_params()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Replace the weights of the model by their average within the context.

        The weights that this rank updates are copied, and restored bit for bit.
        """
        assert self._average is not None, "no state tensor averages the weights"
        key = self._average.name
        weights = {name: param.clone() for name, param in self.updated_params.items()}
        self._set_model_params({name: self.get_state(name)[key] for name in weights})
        try:
            yield
        finally:
            self._set_model_params(weights)

    @torch.no_grad()
    def _set_model_params(self, values: Mapping[str, Tensor]) -> None:
        """Set the model to values of the updated rows of each rank, rounded to nearest."""
        for name, param in self.updated_params.items():
            param.copy_(values[name])
        super().sync_model_params()

    @torch.no_grad()
    def _update_ema(self, skip: Tensor) -> None:
        """Update the moving average after a step, or leave it bit-identical if `skip` is true."""
        for name, average in self._ema.items():
            assert self._ema_decay is not None
            weights = self.optimizer_params[name].float()
            store_update([average], [average.lerp(weights, 1 - self._ema_decay)], skip)

    def _get_step_count(self, name: str) -> Tensor:
        """Return the number of updates, which all parameters share."""
        updated = name if name in self.optimizer_params else next(iter(self.optimizer_params))
        return self.get_state(updated)["step"]

    def _build_gradient_source(
        self, config: Config, mesh: ParallelMesh
    ) -> AutogradAccumulator | GradientReducer:
        precision = self._precision
        if (
            precision.grad_accum_dtype is precision.grad_dtype
            and precision.master_weight_dtype is None
            and not isinstance(self._rounding, StochasticRounding)
            and not self.sharding.is_fsdp
        ):
            accumulator = AutogradAccumulator(self.model_params)
        else:
            rounds = precision.grad_accum_dtype is Dtype.bf16
            accumulator = GradientAccumulator(
                self.model_params,
                TORCH_DTYPES[precision.grad_accum_dtype],
                self._rounding if rounds else NearestRounding(self._compile_backend),
            )
        is_summed_over_tp = mesh.tp.size > 1 and any(
            local.shard.sharding.is_summed_over_tp(mesh.sequence_parallel)
            for local in self.local_params.values()
        )
        if mesh.dp.size == mesh.kv.size == 1 and not (is_summed_over_tp or mesh.tied_embedding):
            return accumulator
        dtype = TORCH_DTYPES[precision.reduce_dtype]
        return GradientReducer(accumulator, self, mesh, dtype)

    def _build_optimizers(self, config: Config, mesh: ParallelMesh) -> list[torch.optim.Optimizer]:
        """Return the optimizers of element-wise updates and of whole matrices, if any."""
        params = self.optimizer_params
        device = next(iter(self.model_params.values())).device
        rule = optimizer_factory.get_update_rule(config.optimizer)
        groups = optimizer_factory.build_param_groups(
            config.optimizer,
            ((param, self.shards[name].role) for name, param in params.items()),
            config.model,
        )
        elementwise = [group for group in groups if group["is_elementwise"]]
        matrices = [group for group in groups if not group["is_elementwise"]]
        optimizers = []
        if elementwise:
            optimizers.append(self._build_elementwise_optimizer(config, rule, elementwise))
        if mesh.stage is not None:
            names = {param: name for name, param in params.items()}
            rounding = self._rounding if isinstance(self._rounding, StochasticRounding) else None
            described = {
                param: MatrixParameter(name, self.shards[name], self.owns(name))
                for param, name in ((p, names[p]) for group in matrices for p in group["params"])
            }
            self._matrix_optimizer = MatrixOptimizer(
                matrices, rule, described, config, mesh.stage, rounding, device
            )
            optimizers.append(self._matrix_optimizer)
        return optimizers

    def _build_elementwise_optimizer(
        self, config: Config, rule: UpdateRule, groups: list[dict[str, Any]]
    ) -> torch.optim.Optimizer:
        precision, params, rounding = self._precision, self.optimizer_params, self._rounding
        one_dtype = precision.grad_accum_dtype is (
            precision.master_weight_dtype or precision.param_dtype
        )
        lr = config.optimizer.lr
        if one_dtype and (self._master_weights or not isinstance(rounding, StochasticRounding)):
            return optimizer_factory.build_optimizer(rule, groups, lr)
        for param in params.values():
            param.grad_dtype = TORCH_DTYPES[precision.grad_accum_dtype]
        names = {param: name for name, param in params.items()}
        return LowPrecisionOptimizer(
            groups,
            rule,
            lr,
            (lambda param, count: rounding.get_update_bits(names[param], count))
            if isinstance(rounding, StochasticRounding)
            else None,
            self._compile_backend,
        )
