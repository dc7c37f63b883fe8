"""Matmuls in bf16 on x86 CPUs without AVX-512."""

import pytest
import torch

from hlat.config.compose import compose_config
from hlat.config.resolve import resolve_config
from hlat.engine.native import cpu_matmul, device
from hlat.engine.native.cpu_matmul import register_bf16_matmuls

BF16_ERROR = 2**-8
"""Relative error of one rounding to bf16, 2**-9, and of a fp32 sum of at most 2,048 terms."""
SHAPES = ((7, 64, 33), (1, 5, 1), (0, 4, 3), (128, 2048, 64))
"""Rows, inner size and columns."""


@pytest.fixture
def kernels():
    library = register_bf16_matmuls.__wrapped__()
    yield
    library._destroy()


def make_operands(rows, inner, columns, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(rows + inner + columns)
    shapes = ((rows, inner), (inner, columns), (columns,), (3, rows, inner), (3, inner, columns))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def compute_matmuls(a, b, bias, batch_a, batch_b):
    """Return the results of each operator, with and without `out`, and of a linear layer."""
    shape, batch_shape = (len(a), b.shape[1]), (3, len(a), b.shape[1])
    return [
        a @ b,
        torch.mm(b.t(), a.t()),
        torch.addmm(bias, a, b, beta=0.5, alpha=2),
        torch.bmm(batch_a, batch_b),
        torch.baddbmm(bias, batch_a, batch_b, beta=2),
        torch.mm(a, b, out=a.new_empty(shape)),
        torch.bmm(batch_a, batch_b, out=a.new_empty(batch_shape)),
        a.new_ones(shape).addmm_(a, b),
        torch.nn.functional.linear(batch_a, b.t(), bias),
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_matmuls_round_once(kernels, shape):
    operands = make_operands(*shape)
    exact = compute_matmuls(*(one.double() for one in operands))
    scales = compute_matmuls(*(one.double().abs() for one in operands))
    for found, expected, scale in zip(compute_matmuls(*operands), exact, scales, strict=True):
        assert found.dtype == torch.bfloat16
        error = (found.double() - expected).abs()
        assert (error <= BF16_ERROR * expected.abs() + 2e-6 * scale).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_are_unchanged(dtype):
    operands = make_operands(33, 65, 17, dtype)
    before = compute_matmuls(*operands)
    library = register_bf16_matmuls.__wrapped__()
    during = compute_matmuls(*operands)
    library._destroy()
    assert all(map(torch.equal, before, during))


def test_gradients(kernels):
    a, b, *_ = (one.requires_grad_() for one in make_operands(9, 30, 11))
    (a @ b).sum().backward()
    ones = torch.ones(9, 11, dtype=torch.float64)
    for found, expected in ((a.grad, ones @ b.double().t()), (b.grad, a.double().t() @ ones)):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), expected, rtol=BF16_ERROR, atol=1e-5)


def test_compiled_matmul(kernels):
    a, b, *_ = make_operands(16, 32, 8)
    compiled = torch.compile(lambda a, b: torch.relu(a @ b), backend="aot_eager")
    assert torch.equal(compiled(a, b), torch.relu(a @ b))


def test_operands_of_two_dtypes_raise_the_error_of_torch(kernels):
    a, b, *_ = make_operands(4, 5, 6)
    with pytest.raises(RuntimeError, match="expected m1 and m2 to have the same dtype"):
        a.float() @ b


@pytest.mark.parametrize(
    ("recipe", "is_supported", "is_added"),
    [
        ("bf16_sr", False, True),
        ("mixed", False, True),
        ("bf16", True, False),
        ("fp32", False, False),
    ],
)
def test_kernels_are_added_for_bf16_recipes_without_instructions(
    monkeypatch, recipe, is_supported, is_added
):
    added = []
    monkeypatch.setattr(cpu_matmul, "has_bf16_matmul", lambda: is_supported)
    monkeypatch.setattr(cpu_matmul, "register_bf16_matmuls", lambda: added.append(True))
    config = resolve_config(compose_config([f"precision={recipe}"]))
    device.prepare_device(config, torch.device("cpu"))
    assert bool(added) == is_added
