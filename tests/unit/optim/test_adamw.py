"""AdamW compared with PyTorch and with the update in float64, and construction of optimizers."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from hlat.config.optimizer import OptimizerConfig
from hlat.model.parameter_spec import ParameterRole
from hlat.optim.adamw import ADAMW, has_fused_adamw
from hlat.optim.capturable_optimizer import CapturableOptimizer
from hlat.optim.eager_optimizer import FusedOptimizer
from hlat.optim.optimizer_factory import (
    build_optimizer,
    build_param_groups,
    set_lr,
    step_optimizer,
)

SHAPES = [(7,), (33, 5), (4, 3, 2)]
SETTINGS = OptimizerConfig(lr=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


def tensors(seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(scale * torch.randn(shape, generator=generator)).to(dtype) for shape in SHAPES]


def build_groups(settings: OptimizerConfig, params: list[Tensor]) -> list[dict[str, Any]]:
    """Return parameter groups with vectors as norms."""
    roles = [ParameterRole.norm if p.dim() == 1 else ParameterRole.matrix for p in params]
    return build_param_groups(settings, zip(params, roles, strict=True))


def build_adamw(settings: OptimizerConfig, params: list[Tensor]) -> torch.optim.Optimizer:
    return build_optimizer(ADAMW, build_groups(settings, params), settings.lr)


def update_in_float64(
    weights: list[Tensor], gradients: list[list[Tensor]], rates: list[float]
) -> None:
    """Apply algorithm 2 of Loshchilov and Hutter, arXiv 1711.05101, in float64."""
    first = [torch.zeros_like(w) for w in weights]
    second = [torch.zeros_like(w) for w in weights]
    for step, (rate, step_gradients) in enumerate(zip(rates, gradients, strict=True), start=1):
        for w, g, m, v in zip(weights, step_gradients, first, second, strict=True):
            w.mul_(1 - rate * 0.1)
            m.mul_(0.9).add_(0.1 * g.double())
            v.mul_(0.95).add_(0.05 * g.double() ** 2)
            corrected = (v / (1 - 0.95**step)).sqrt() + 1e-8
            w.sub_(rate * m / (1 - 0.9**step) / corrected)


def remove_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the fused kernel fail when it is called, as on a device without the kernel."""

    def fail(*_: Any, **__: Any) -> None:
        raise NotImplementedError("no kernel for this device")

    monkeypatch.setattr(torch, "_fused_adamw_", fail)


@pytest.mark.parametrize("fused", [True, False])
def test_update_is_adamw_with_decay_on_every_parameter(monkeypatch, fused: bool) -> None:
    if not fused:
        remove_kernel(monkeypatch)
    parameters = [torch.nn.Parameter(w) for w in tensors(0)]
    expected = [w.double() for w in tensors(0)]
    gradients = [tensors(seed) for seed in range(1, 6)]
    rates = [3e-3, 2e-3, 1e-3, 0.0, 5e-3]
    optimizer = build_adamw(SETTINGS, parameters)
    for rate, step_gradients in zip(rates, gradients, strict=True):
        for parameter, gradient in zip(parameters, step_gradients, strict=True):
            parameter.grad = gradient.clone()
        set_lr(optimizer, rate)
        optimizer.step()
    update_in_float64(expected, gradients, rates)
    for parameter, weight in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach().double(), weight, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("decay_norms", [True, False])
def test_decay_of_norms_equals_torch_with_two_groups(decay_norms: bool) -> None:
    """Vary decay of vectors; matrices decay in both cases."""
    settings = dataclasses.replace(SETTINGS, decay_norms=decay_norms)
    ours, theirs = ([torch.nn.Parameter(w) for w in tensors(0)] for _ in range(2))
    peer = torch.optim.AdamW(
        [
            {"params": theirs[1:], "weight_decay": 0.1},
            {"params": theirs[:1], "weight_decay": 0.1 if decay_norms else 0.0},
        ],
        lr=3e-3,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    optimizer = build_adamw(settings, ours)
    for seed in range(1, 6):
        for parameter, other, gradient in zip(ours, theirs, tensors(seed), strict=True):
            parameter.grad, other.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        peer.step()
    for parameter, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-6, atol=1e-7)


def test_a_model_without_norms_or_without_matrices_has_one_group() -> None:
    apart = dataclasses.replace(SETTINGS, decay_norms=False)
    vector, matrix = torch.ones(3), torch.ones(3, 3)
    for settings, params, expected in (
        (apart, [vector], [0.0]),
        (apart, [matrix], [0.1]),
        (apart, [vector, matrix, vector], [0.0, 0.1]),
        (SETTINGS, [vector, matrix], [0.1]),
    ):
        groups = build_groups(settings, params)
        assert [group["weight_decay"] for group in groups] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_take_the_dtype_of_the_tensors(dtype: torch.dtype) -> None:
    parameter = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    optimizer = build_adamw(SETTINGS, [parameter])
    optimizer.step()
    state = optimizer.state[parameter]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_where_the_device_has_the_kernel(monkeypatch, dtype: torch.dtype) -> None:
    """Decide before the first step: torch accepts `fused=True` for devices without the kernel."""
    weights = [torch.nn.Parameter(torch.ones(1, dtype=dtype))]
    optimizer = build_adamw(SETTINGS, weights)
    assert isinstance(optimizer, FusedOptimizer)
    assert not has_fused_adamw(torch.device("xla"), dtype)  # no kernel is registered

    with monkeypatch.context() as patch:
        remove_kernel(patch)
        assert isinstance(build_adamw(SETTINGS, weights), CapturableOptimizer)
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *_, **__: None)  # computes nothing
    assert isinstance(build_adamw(SETTINGS, weights), CapturableOptimizer)


def test_a_group_without_gradients_is_not_updated() -> None:
    vector, matrix = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4, 4))
    settings = dataclasses.replace(SETTINGS, decay_norms=False)
    optimizer = build_adamw(settings, [vector, matrix])
    assert len(optimizer.param_groups) == 2
    matrix.grad = torch.ones_like(matrix)
    optimizer.step()
    assert torch.equal(vector, torch.ones(4))
    assert not torch.equal(matrix, torch.ones(4, 4))
    assert optimizer.state[vector]["step"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_and_skips_are_those_of_torch_bit_for_bit(dtype: torch.dtype) -> None:
    ours, theirs = ([torch.nn.Parameter(w.to(dtype)) for w in tensors(0)] for _ in range(2))
    optimizer = build_adamw(SETTINGS, ours)
    peer = torch.optim.AdamW(
        theirs, SETTINGS.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True
    )
    for step in range(1, 6):
        skip = torch.tensor(step == 3)
        for parameter, other, gradient in zip(ours, theirs, tensors(step), strict=True):
            parameter.grad, other.grad = gradient.to(dtype), gradient.to(dtype)
        step_optimizer(optimizer, skip)
        step_optimizer(peer, skip)
    for parameter, other in zip(ours, theirs, strict=True):
        assert torch.equal(parameter, other)
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[parameter][name], peer.state[other][name])


def test_skipped_step_changes_nothing_without_the_kernel(monkeypatch) -> None:
    remove_kernel(monkeypatch)
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = build_adamw(SETTINGS, [weight])
    for gradient in (1.0, float("nan")):
        weight.grad = torch.full_like(weight, gradient)
        before = [tensor.clone() for tensor in (weight, *optimizer.state[weight].values())]
        step_optimizer(optimizer, ~torch.isfinite(weight.grad).all())
    after = [weight, *optimizer.state[weight].values()]
    assert all(map(torch.equal, before, after))
    assert int(optimizer.state[weight]["step"]) == 1


@pytest.mark.parametrize("fused", [True, False])
def test_lr_factor_scales_the_rate_of_a_group(fused: bool) -> None:
    rule = ADAMW if fused else dataclasses.replace(ADAMW, fused=None)
    weights = [torch.nn.Parameter(torch.ones(3, 3)) for _ in range(2)]
    groups = [build_groups(SETTINGS, [weight])[0] for weight in weights]
    groups[1]["lr_factor"] = 0.5
    optimizer = build_optimizer(rule, groups, SETTINGS.lr)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    set_lr(optimizer, 0.25)
    optimizer.step()
    changes = [float((1 - weight.detach()).mean()) for weight in weights]
    assert changes[1] == pytest.approx(changes[0] / 2, rel=1e-5)
