"""Muon compared with torch.optim.Muon and with exact orthogonalization."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hlat.config.optimizer import OptimizerConfig
from hlat.config.precision import Dtype
from hlat.model.parameter_spec import ParameterRole
from hlat.optim.muon import compute_matrix_update, orthogonalize
from hlat.optim.muon_spec import MuonConfig, MuonSpec, UpdateScale
from hlat.optim.optimizer_factory import build_param_groups

SHAPES = [(64, 96), (96, 64), (64, 64), (1, 48), (48, 1), (7, 5)]
SPEC = MuonSpec()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", UpdateScale)
@pytest.mark.parametrize("shape", SHAPES)
def test_updates_are_those_of_torch_bit_for_bit(shape, scale: UpdateScale, nesterov: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(shape, generator=generator))
    ours, average = weight.detach().clone(), torch.zeros(shape)
    theirs = torch.optim.Muon([weight], lr=0.01, adjust_lr_fn=scale.value, nesterov=nesterov)
    settings = OptimizerConfig(lr=0.01, muon=MuonConfig(scale=scale, nesterov=nesterov))
    group = SPEC.build_hyperparameters(settings, ParameterRole.matrix)
    ratio = SPEC.get_matrix_scale(settings, shape)
    for step in range(1, 6):
        gradient = torch.randn(shape, generator=generator)
        weight.grad = gradient.clone()
        theirs.step()
        update, average = compute_matrix_update([gradient, average], torch.tensor(step), group)
        ours = ours.mul(1 - 0.01 * 0.1).add(update, alpha=-0.01 * ratio)
    assert torch.equal(ours, weight)
    assert torch.equal(average, theirs.state[weight]["momentum_buffer"])


@pytest.mark.parametrize("shape", [(64, 96), (96, 64)])
@pytest.mark.parametrize(
    ("dtype", "low", "high"), [(torch.float32, 0.6, 1.3), (torch.bfloat16, 0.6, 1.3)]
)
def test_singular_values_are_near_one_and_vectors_are_unchanged(shape, dtype, low, high) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    found = left.T @ orthogonalize(matrix, 5, dtype).float() @ right.T
    diagonal = found.diagonal()
    assert low < diagonal.min() <= diagonal.max() < high
    limit = 1e-5 if dtype is torch.float32 else 0.03
    assert (found - torch.diag(diagonal)).abs().max() < limit


def test_a_gradient_of_zero_gives_no_update() -> None:
    assert torch.equal(
        orthogonalize(torch.zeros(8, 4), 5, torch.bfloat16).float(), torch.zeros(8, 4)
    )


@pytest.mark.parametrize("shape", [(64, 96), (96, 64), (64, 64)])
def test_flops_are_those_that_torch_counts(shape) -> None:
    settings = OptimizerConfig(lr=0.01, muon=MuonConfig(num_iterations=3))
    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.randn(shape), 3, torch.float32)
    expected = SPEC.count_matmul_flops(settings, ParameterRole.residual, shape)
    assert counter.get_total_flops() == expected
    assert SPEC.count_matmul_flops(settings, ParameterRole.embedding, shape) == 0


def test_only_matrices_of_layers_are_orthogonalized_and_others_have_their_rate() -> None:
    settings = OptimizerConfig(
        name="muon", lr=0.02, muon=MuonConfig(adamw_lr=0.003, iteration_dtype=Dtype.fp32)
    )
    params = [(torch.nn.Parameter(torch.ones(2, 2)), role) for role in ParameterRole]
    groups = build_param_groups(settings, params)
    whole = [group for group in groups if not group["is_elementwise"]]
    assert [len(group["params"]) for group in whole] == [2]  # matrix and residual
    assert (whole[0]["lr_factor"], whole[0]["state_names"]) == (1.0, ["momentum_buffer"])
    for group in groups:
        if group["is_elementwise"]:
            assert group["lr_factor"] == pytest.approx(0.15)
            assert group["state_names"] == ["exp_avg", "exp_avg_sq"]
