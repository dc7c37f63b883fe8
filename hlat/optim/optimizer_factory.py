"""Construction and steps of torch optimizers, for the optimizer that a configuration selects."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hlat.config.components import get_implementation
from hlat.config.model import ModelConfig
from hlat.config.optimizer import OptimizerConfig
from hlat.model.parameter_spec import ParameterRole
from hlat.optim import adamw as adamw  # registers its update rule
from hlat.optim import ademamix as ademamix
from hlat.optim import lion as lion
from hlat.optim import muon as muon
from hlat.optim import normuon as normuon
from hlat.optim import schedule_free as schedule_free
from hlat.optim import soap as soap
from hlat.optim.capturable_optimizer import CapturableOptimizer
from hlat.optim.eager_optimizer import FusedOptimizer
from hlat.optim.optimizer_spec import get_optimizer_spec
from hlat.optim.parametrization import compute_update_settings
from hlat.optim.update_rule import ParamGroups, UpdateRule
from hlat.precision.torch_dtypes import TORCH_DTYPES


def get_update_rule(settings: OptimizerConfig) -> UpdateRule:
    """Return the update rule of the configured optimizer."""
    rule: UpdateRule = get_implementation("optimizer", settings.name)
    return rule


def build_param_groups(
    settings: OptimizerConfig,
    params: Iterable[tuple[Tensor, ParameterRole]],
    model: ModelConfig | None = None,
) -> list[dict[str, Any]]:
    """Return a parameter group per combination of settings, given parameters with their roles.

    Groups have the settings of the update rule, `state_names`, `state_dtypes`, `is_elementwise` and
    `lr_factor`.
    The parametrization is that of `model`; None: standard.
    """
    groups = list[dict[str, Any]]()
    for param, role in params:
        group = build_group_settings(settings, role, model)
        same = next((one for one in groups if {**one, "params": 0} == {**group, "params": 0}), None)
        if same is None:
            groups.append({**group, "params": [param]})
        else:
            same["params"].append(param)
    return groups


def build_group_settings(
    settings: OptimizerConfig, role: ParameterRole, model: ModelConfig | None = None
) -> dict[str, Any]:
    """Return the settings of a parameter group of parameters with a role."""
    spec = get_optimizer_spec(settings.name)
    update = compute_update_settings(settings, role, model)
    hyperparameters = spec.build_hyperparameters(settings, role)
    if "eps" in hyperparameters:
        hyperparameters["eps"] *= update.eps_factor
    return {
        "lr_factor": update.lr_factor,
        "weight_decay": update.weight_decay,
        "state_names": [tensor.name for tensor in spec.list_state_tensors(role)],
        "state_dtypes": {
            tensor.name: TORCH_DTYPES[tensor.dtype]
            for tensor in spec.list_state_tensors(role)
            if tensor.dtype is not None
        },
        "is_elementwise": spec.is_elementwise(role),
        **hyperparameters,
    }


def build_optimizer(
    rule: UpdateRule, param_groups: ParamGroups, lr: float
) -> torch.optim.Optimizer:
    """Return an optimizer for weights, or master weights, with gradients and state of their dtype.

    It calls the fused kernel if the device has it, else it is a CapturableOptimizer.
    The engine sets each step's rate with `set_lr`.
    """
    groups = [*param_groups]
    param = groups[0]["params"][0]
    if rule.fused is None or not rule.fused.is_available(param.device, param.dtype):
        return CapturableOptimizer(groups, rule, lr)
    return FusedOptimizer(groups, rule.fused, lr)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next steps."""
    if isinstance(optimizer, CapturableOptimizer):
        optimizer.set_lr(lr)
        return
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]


def step_optimizer(optimizer: Any, skip: Tensor) -> None:
    """Step the optimizer, or change nothing if the bool scalar `skip` on the device is true.

    Fused kernels, CapturableOptimizer and LowPrecisionOptimizer evaluate `skip` on the device
    through torch's gradient scaler interface; other implementations synchronize with the host.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale, optimizer.found_inf = None, skip.float()
        optimizer.step()
    elif not skip:
        optimizer.step()
