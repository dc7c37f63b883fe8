"""Muon compared with torch.optim.Muon and with exact orthogonalization."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hlat.config.model import ModelConfig
from hlat.config.optimizer import OptimizerConfig
from hlat.config.precision import Dtype
from hlat.config.resolve import resolve_config
from hlat.distributed.mesh_coordinates import ParallelDegrees
from hlat.model.decoder_spec import list_module_parameters
from hlat.model.parameter_spec import ParameterRole
from hlat.optim.muon import compute_matrix_update, orthogonalize
from hlat.optim.muon_spec import MuonConfig, MuonSpec, UpdateScale
from hlat.optim.optimizer_factory import build_param_groups
from hlat.optim.optimizer_spec import compute_joint_shape, group_matrices
from hlat.plan.pipeline_stage_shards import build_stage_shards
from hlat.plan.update_cost import compute_matrix_update_flops

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


def test_joint_matrices_are_those_of_heads() -> None:
    parameters = list_module_parameters(ModelConfig("tiny", 1, 8, 6, 4, 2, 9))
    for is_joint, number in ((False, 7), (True, 5)):
        settings = OptimizerConfig(name="muon", lr=1.0, muon=MuonConfig(joint_qkv=is_joint))
        groups = group_matrices(settings, parameters)
        assert len(groups) == number
        assert compute_joint_shape(groups[0]) == ((16, 8) if is_joint else (8, 8))
        names = [[spec.name.split(".")[-2] for spec in specs] for specs in groups]
        assert (["q_proj", "k_proj", "v_proj"] in names) is is_joint
        assert {("gate_proj",), ("up_proj",)} <= {tuple(each) for each in names}


def test_the_plan_has_the_flops_of_joint_matrices(compose) -> None:
    flops = []
    for is_joint in ("false", "true"):
        overrides = ("model=llama_tiny", "optimizer=muon", f"optimizer.muon.joint_qkv={is_joint}")
        config = resolve_config(compose(*overrides))
        mesh = ParallelDegrees()
        (stage,) = build_stage_shards(config.model, mesh)
        flops.append(compute_matrix_update_flops(config, mesh, stage))
    model = config.model
    sizes = [
        model.head_dim * n for n in (model.num_attention_heads, *[model.num_key_value_heads] * 2)
    ]
    shapes = [(size, model.hidden_size) for size in sizes]

    def count(shape: tuple[int, int]) -> float:
        return SPEC.count_matmul_flops(config.optimizer, ParameterRole.matrix, shape)

    gap = count((sum(sizes), model.hidden_size)) - sum(map(count, shapes))
    assert gap != 0
    assert flops[1] - flops[0] == pytest.approx(model.num_layers * gap, rel=1e-9)
