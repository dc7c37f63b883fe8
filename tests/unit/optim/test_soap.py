"""SOAP compared with pytorch_optimizer, and its eigenbases with exact ones."""

import importlib

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hlat.config.optimizer import OptimizerConfig
from hlat.model.parameter_spec import ParameterRole
from hlat.optim.soap import compute_eigenbasis, compute_matrix_update, improve_eigenbasis
from hlat.optim.soap_spec import SoapConfig, SoapSpec

SPEC = SoapSpec()
RATE, STEPS = 0.01, 50
SHAPES = [(32, 32), (24, 40), (40, 24)]


def build_settings(**settings) -> OptimizerConfig:
    return OptimizerConfig(name="soap", lr=RATE, soap=SoapConfig(**settings))


def build_arguments(settings: OptimizerConfig, shape) -> tuple[dict, list[Tensor]]:
    """Return the arguments of the update rule, and a state of zero."""
    role = ParameterRole.matrix
    shapes = SPEC.compute_state_shapes(settings, role, shape)
    arguments = SPEC.build_hyperparameters(settings, role) | {"state_names": [*shapes]}
    return arguments, [torch.zeros(each) for each in shapes.values()]


def sample_gram(size: int) -> Tensor:
    matrix = torch.randn(size, 2 * size, generator=torch.Generator().manual_seed(2))
    return matrix @ matrix.T


@pytest.mark.parametrize("max_dim", [10000, 32, 10])
@pytest.mark.parametrize("shape", SHAPES)
def test_fifty_updates_are_those_of_pytorch_optimizer(shape, max_dim: int) -> None:
    package = importlib.import_module("pytorch_optimizer")
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(shape, generator=generator))
    ours = weight.detach().clone()
    theirs = package.SOAP(
        [weight],
        lr=RATE,
        betas=(0.9, 0.95),
        shampoo_beta=0.8,
        weight_decay=0.0,
        precondition_frequency=5,
        max_precondition_dim=max_dim,
    )
    settings = build_settings(
        preconditioner_beta=0.8, precondition_frequency=5, max_preconditioner_dim=max_dim
    )
    arguments, state = build_arguments(settings, shape)
    for step in range(1, STEPS + 1):
        gradient = torch.randn(shape, generator=generator)
        weight.grad = gradient.clone()
        theirs.step()
        update, *state = compute_matrix_update([gradient, *state], torch.tensor(step), arguments)
        ours = ours.add(update, alpha=-RATE)
        # An update has elements of about 1; its rounding errors are those of six matmuls
        error = (ours - weight.detach()).norm()
        assert error <= 2e-6 * RATE * step * weight.numel() ** 0.5, step
    assert (ours - weight.detach()).abs().max() > 0 or min(shape) > max_dim


def test_the_first_update_computes_eigenbases_only() -> None:
    arguments, state = build_arguments(build_settings(), (6, 4))
    state[0] += 1  # the average of another optimizer
    gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    update, *state = compute_matrix_update([gradient, *state], torch.tensor(1), arguments)
    found = dict(zip(arguments["state_names"], state, strict=True))
    assert not update.any()
    assert not found["exp_avg"].any()
    assert not found["rotated_exp_avg_sq"].any()
    torch.testing.assert_close(found["left_gram"], 0.05 * gradient @ gradient.T)
    torch.testing.assert_close(found["right_gram"], 0.05 * gradient.T @ gradient)
    basis = found["right_basis"]
    diagonal = basis.T @ found["right_gram"] @ basis
    torch.testing.assert_close(diagonal, diagonal.diagonal().diag(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("step", [1, 11])
def test_a_gradient_that_is_not_finite_raises_no_error(value: float, step: int) -> None:
    arguments, state = build_arguments(build_settings(), (6, 4))
    gradient = torch.full((6, 4), value)
    update, *_ = compute_matrix_update([gradient, *state], torch.tensor(step), arguments)
    assert update.shape == (6, 4)


def test_eigenvectors_have_a_fixed_order_and_sign() -> None:
    gram = sample_gram(32)
    basis = compute_eigenbasis(gram)
    torch.testing.assert_close(basis.T @ basis, torch.eye(32), rtol=0, atol=1e-5)
    values = (basis.T @ gram @ basis).diagonal()
    assert (values[:-1] > values[1:]).all()
    torch.testing.assert_close(values, torch.linalg.eigvalsh(gram.double()).flip(0).float())
    assert (basis.gather(0, basis.abs().argmax(0, keepdim=True)) > 0).all()
    noise = 1 + 1e-6 * torch.randn(32, 32, generator=torch.Generator().manual_seed(3))
    assert (compute_eigenbasis(gram * noise * noise.T) - basis).abs().max() < 1e-3


def test_the_power_method_converges_to_the_eigenbasis_without_changes_of_sign() -> None:
    gram = sample_gram(8)
    basis = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(4)))[0]
    for _ in range(300):
        former, (basis, order) = basis, improve_eigenbasis(gram, basis)
    assert torch.equal(order, torch.arange(8))
    assert (basis - former).abs().max() < 1e-5
    exact = compute_eigenbasis(gram)
    assert ((exact.T @ basis).abs() - torch.eye(8)).abs().max() < 1e-4


def test_the_order_of_the_basis_moves_the_second_moment() -> None:
    """A basis with swapped columns and a second moment in their order give the same update."""
    settings = build_settings(precondition_frequency=1)
    arguments, state = build_arguments(settings, (8, 5))
    generator = torch.Generator().manual_seed(5)
    for step in range(1, 4):
        gradient = torch.randn(8, 5, generator=generator)
        _, *state = compute_matrix_update([gradient, *state], torch.tensor(step), arguments)
    names = arguments["state_names"]
    swapped = dict(zip(names, state, strict=True))
    order = torch.randperm(8, generator=generator)
    swapped["left_basis"] = swapped["left_basis"][:, order]
    swapped["rotated_exp_avg_sq"] = swapped["rotated_exp_avg_sq"][order]
    results = []
    for values in (state, [*swapped.values()]):
        _, *values = compute_matrix_update([gradient, *values], torch.tensor(4), arguments)
        results.append(compute_matrix_update([gradient, *values], torch.tensor(5), arguments))
    for name, one, other in zip(["update", *names], *results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("max_dim", [10000, 24])
def test_flops_of_matmuls_are_those_that_torch_counts(max_dim: int) -> None:
    settings = build_settings(precondition_frequency=2, max_preconditioner_dim=max_dim)
    shape = (24, 40)
    arguments, state = build_arguments(settings, shape)
    counts = []
    for step in (4, 5):
        with FlopCounterMode(display=False) as counter:
            values = [torch.randn(shape), *state]
            compute_matrix_update(values, torch.tensor(step), arguments)
        counts.append(counter.get_total_flops())
    dims = [dim for dim in shape if dim <= max_dim]
    qr = sum(8 / 3 * dim**3 for dim in dims)
    expected = SPEC.count_matmul_flops(settings, ParameterRole.matrix, shape)
    assert (sum(counts) + qr) / 2 == pytest.approx(expected, rel=1e-12)
    assert SPEC.count_matmul_flops(settings, ParameterRole.head, shape) == 0


def test_large_dimensions_have_no_preconditioner() -> None:
    settings = build_settings(max_preconditioner_dim=24)
    shapes = SPEC.compute_state_shapes(settings, ParameterRole.residual, (24, 40))
    assert [*shapes] == ["exp_avg", "rotated_exp_avg_sq", "left_gram", "left_basis"]
    assert shapes["left_basis"] == (24, 24)
