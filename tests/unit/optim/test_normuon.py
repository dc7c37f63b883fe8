"""NorMuon compared with pytorch_optimizer, and the size of its rows."""

import importlib
from functools import partial

import pytest
import torch

from hlat.config.optimizer import OptimizerConfig
from hlat.config.precision import Dtype
from hlat.model.parameter_spec import ParameterRole
from hlat.optim.muon_spec import UpdateScale
from hlat.optim.normuon import compute_matrix_update
from hlat.optim.normuon_spec import NorMuonConfig, NorMuonSpec

SPEC = NorMuonSpec()
RATE, STEPS = 0.01, 50
MODES = {UpdateScale.original: "preserve_norm", UpdateScale.match_rms_adamw: "match_rms"}


def build_settings(scale: UpdateScale, **settings) -> OptimizerConfig:
    normuon = NorMuonConfig(scale=scale, iteration_dtype=Dtype.fp32, **settings)
    return OptimizerConfig(name="normuon", lr=RATE, normuon=normuon)


@pytest.mark.parametrize("scale", UpdateScale)
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (1, 16)])
def test_fifty_updates_are_those_of_pytorch_optimizer(monkeypatch, shape, scale) -> None:
    package = importlib.import_module("pytorch_optimizer")
    base = importlib.import_module("pytorch_optimizer.optimizer.muon.normuon")
    name = "zero_power_via_newton_schulz_5"
    in_fp32 = partial(getattr(base, name), dtype=torch.float32)
    monkeypatch.setattr(base, name, in_fp32)
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(shape, generator=generator))
    group = {"params": [weight], "use_muon": True, "lr": RATE, "weight_decay": 0.1}
    theirs = package.NorMuon([group], update_scale=MODES[scale], foreach=False)
    settings = build_settings(scale)
    arguments = SPEC.build_hyperparameters(settings, ParameterRole.matrix)
    ratio = RATE * SPEC.get_matrix_scale(settings, shape)
    if scale is UpdateScale.original:  # the package does not apply it in this mode
        assert ratio == pytest.approx(RATE * max(1, shape[0] / shape[1]) ** 0.5)
    ours = weight.detach().clone()
    state = [torch.zeros(shape), torch.zeros(shape[0], 1)]
    for step in range(1, STEPS + 1):
        gradient = torch.randn(shape, generator=generator)
        weight.grad = gradient.clone()
        theirs.step()
        update, *state = compute_matrix_update([gradient, *state], torch.tensor(step), arguments)
        ours = ours * (1 - RATE * 0.1) + update * -ratio
    # Five iterations multiply rounding errors of 2^-24 by about 100 in the smallest directions
    assert (ours - weight).norm() <= 1e-5 * RATE * STEPS * weight.numel() ** 0.5
    for key, tensor in zip(("momentum_buffer", "second_momentum_buffer"), state, strict=True):
        torch.testing.assert_close(tensor, theirs.state[weight][key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_the_first_update_has_rows_of_equal_size_and_a_root_mean_square_of_a_fifth(shape) -> None:
    settings = build_settings(UpdateScale.match_rms_adamw)
    arguments = SPEC.build_hyperparameters(settings, ParameterRole.matrix)
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    gradient *= torch.logspace(-2, 2, shape[0])[:, None]
    state = torch.zeros(shape), torch.zeros(shape[0], 1)
    update, *_ = compute_matrix_update([gradient, *state], torch.tensor(1), arguments)
    scaled = update * SPEC.get_matrix_scale(settings, shape)
    rows = scaled.square().mean(dim=1).sqrt()
    torch.testing.assert_close(rows, torch.full_like(rows, 0.2), rtol=1e-5, atol=0)


def test_only_matrices_have_a_second_moment_per_row() -> None:
    settings = build_settings(UpdateScale.original)
    shapes = SPEC.compute_state_shapes(settings, ParameterRole.residual, (8, 6))
    assert shapes == {"momentum_buffer": (8, 6), "second_momentum_buffer": (8, 1)}
    shapes = SPEC.compute_state_shapes(settings, ParameterRole.embedding, (8, 6))
    assert shapes == {"exp_avg": (8, 6), "exp_avg_sq": (8, 6)}
