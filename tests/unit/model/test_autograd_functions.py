"""Operators with custom backward passes, compared with autograd of torch in double precision."""

import pytest
import torch
from torch import Tensor
from torch.autograd import grad
from torch.nn.functional import gelu, silu
from torch.nn.functional import rms_norm as torch_rms_norm
from torch.utils.checkpoint import checkpoint

from hlat.model.autograd_functions import geglu, rms_norm, rotate, swiglu

TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 4e-3}
EPS = 1e-5


@pytest.fixture(params=TOLERANCES, ids=["fp32", "bf16"])
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture(autouse=True)
def _seed():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def some(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def double(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def compare(result: tuple[Tensor, ...], expected: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    for one, other in zip(result, expected, strict=True):
        assert one.dtype == dtype
        assert (one.double() - other).norm() <= TOLERANCES[dtype] * other.norm()


def gelu_tanh(x: Tensor) -> Tensor:
    return gelu(x, approximate="tanh")


GLUS = {"swiglu": (swiglu, silu), "geglu": (geglu, gelu_tanh)}
"""Function and activation of the gate by name."""


def test_rms_norm_and_its_gradients(dtype) -> None:
    x, weight, upstream = some(dtype, 3, 5, 24), some(dtype, 24), some(dtype, 3, 5, 24)
    y = rms_norm(x, weight, EPS)
    x64, weight64, upstream64 = double(x, weight, upstream)
    y64 = torch_rms_norm(x64, (24,), weight64, EPS)
    result, expected = grad(y, (x, weight), upstream), grad(y64, (x64, weight64), upstream64)
    compare((y, *result), (y64, *expected), dtype)


def test_rms_norm_is_bit_identical_to_torch(dtype) -> None:
    x, weight = some(dtype, 3, 5, 24), some(dtype, 24)
    assert torch.equal(rms_norm(x, weight, EPS), torch_rms_norm(x, (24,), weight, EPS))


@pytest.mark.parametrize("name", GLUS)
@pytest.mark.parametrize("block", [1, 3, 24])
def test_gated_linear_units_and_their_gradients(dtype, block, name) -> None:
    glu, activation = GLUS[name]
    blocks, upstream = some(dtype, 3, 5, 48), some(dtype, 3, 5, 24)
    y = glu(blocks, block)
    blocks64, upstream64 = double(blocks, upstream)
    gate, up = blocks64.unflatten(-1, (-1, 2, block)).unbind(-2)
    y64 = (activation(gate) * up).flatten(-2)
    result, expected = grad(y, blocks, upstream), grad(y64, blocks64, upstream64)
    compare((y, *result), (y64, *expected), dtype)


def test_only_inputs_and_one_value_per_position_are_saved(dtype) -> None:
    x, weight, blocks = some(dtype, 3, 5, 24), some(dtype, 24), some(dtype, 3, 5, 48)
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)), id):
        rms_norm(x, weight, EPS)
        swiglu(blocks, 3)
        geglu(blocks, 3)
    assert saved == [(3, 5, 24), (24,), (3, 5, 1), (3, 5, 48), (3, 5, 48)]


@pytest.mark.parametrize("name", GLUS)
def test_gradients_are_the_same_when_recomputed(dtype, name) -> None:
    glu, _ = GLUS[name]
    x, weight = some(dtype, 3, 5, 24), some(dtype, 24)

    def both(x: Tensor, weight: Tensor) -> Tensor:
        return glu(rms_norm(x, weight, EPS), 3)

    plain = grad(both(x, weight).sum(), (x, weight))
    again = grad(checkpoint(both, x, weight, use_reentrant=False).sum(), (x, weight))
    assert all(torch.equal(*pair) for pair in zip(plain, again, strict=True))


@pytest.mark.parametrize("has_documents", [False, True], ids=["one range", "documents"])
def test_rotation_is_bit_identical_to_its_formula(dtype, has_documents) -> None:
    projected, upstream = some(dtype, 2, 5, 3, 4, 8), some(dtype, 2, 5, 3, 8)
    x = projected[:, :, :, 1]  # heads of a fused projection are not contiguous
    angles = torch.randn(*([2] if has_documents else []), 5, 4)
    angles = torch.cat((angles, angles), -1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    first, second = x.chunk(2, -1)
    swapped = torch.cat((-second, first), -1)
    formula = x * cos.unsqueeze(-2) + swapped * sin.unsqueeze(-2)
    y = rotate(x, cos, sin)
    assert torch.equal(y, formula)
    assert torch.equal(*(grad(one, projected, upstream)[0] for one in (y, formula)))
    with torch.no_grad():
        assert torch.equal(rotate(x, cos, sin), formula)
