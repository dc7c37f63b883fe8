"""Causal attention by blocks equals torch's in fp64; compiled layers on a CPU use it."""

# ruff: noqa: N812

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hlat.model.attention_kernels import attend
from hlat.model.block_attention import causal_block_attention

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Largest error relative to the largest element of the tensor, or to 1 if that is smaller. 700 random cases in bf16: at
most 0.016, and 0.024 for the kernel of torch."""
SCALE = 0.3


def build_inputs(dtype: torch.dtype, shape_BGRSD: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    """Return q, k, v and the gradient of the output."""
    num_rows, num_groups, queries_per_group, num_tokens, head_dim = shape_BGRSD
    num_heads = num_groups * queries_per_group
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(num_rows, num_tokens, heads, head_dim, generator=generator)
        .to(dtype)
        .transpose(1, 2)
        for heads in (num_heads, num_groups, num_groups, num_heads)
    ]


def run(attention: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    """Return the output and the gradients of q, k and v."""
    *inputs, grad = (tensor.clone() for tensor in tensors)
    output = attention(*(x.requires_grad_() for x in inputs))
    return [output.detach(), *torch.autograd.grad(output, inputs, grad)]


def attend_by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)


def attend_by_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal_block_attention(q, k, v, SCALE)


@given(
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.tuples(
        st.integers(1, 3),
        st.integers(1, 3),
        st.integers(1, 3),
        st.sampled_from([1, 2, 127, 128, 129, 300]),
        st.sampled_from([1, 7, 64]),
    ),
    st.integers(0, 9),
)
@settings(max_examples=30)
def test_outputs_and_gradients_equal_torch_in_fp64(dtype, shape, seed: int) -> None:
    tensors = build_inputs(dtype, shape, seed)
    expected = run(attend_by_torch, *(tensor.double() for tensor in tensors))
    for actual, reference in zip(run(attend_by_blocks, *tensors), expected, strict=True):
        assert actual.dtype is dtype
        limit = TOLERANCES[dtype] * max(1.0, reference.abs().max().item())
        assert (actual.double() - reference).abs().max().item() <= limit


@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not")
@pytest.mark.parametrize(
    ("dtype", "num_tokens", "expected"),
    [
        (torch.bfloat16, 130, attend_by_blocks),
        (torch.bfloat16, 512, attend_by_blocks),
        (torch.bfloat16, 513, attend_by_torch),
        (torch.float32, 130, attend_by_torch),
    ],
)
def test_compiled_layers_use_the_blocks_where_they_are_faster(
    dtype, num_tokens: int, expected
) -> None:
    """The backend `eager` traces as a compiler does, and runs torch's operators."""
    tensors = build_inputs(dtype, (1, 2, 2, num_tokens, 8))

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, SCALE)

    eager = zip(run(forward, *tensors), run(attend_by_torch, *tensors), strict=True)
    assert all(torch.equal(*pair) for pair in eager)
    torch.compiler.reset()
    compiled = torch.compile(forward, fullgraph=True, backend="eager")
    for pair in zip(run(compiled, *tensors), run(expected, *tensors), strict=True):
        assert torch.equal(*pair)


@pytest.mark.slow  # compiles
@pytest.mark.xdist_group("compile")
@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_compiled_by_inductor() -> None:
    tensors = build_inputs(torch.bfloat16, (2, 2, 2, 300, 16))
    compiled = torch.compile(attend_by_blocks, fullgraph=True)
    for actual, eager in zip(run(compiled, *tensors), run(attend_by_blocks, *tensors), strict=True):
        torch.testing.assert_close(actual, eager, rtol=2e-2, atol=2e-2)
