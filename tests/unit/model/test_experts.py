"""Matmuls of experts, grouped or in turn, equal the network of one expert after the other."""

import pytest
import torch

from hlat.config.resolve import resolve_config
from hlat.model import experts as module
from hlat.model.experts import apply_experts
from hlat.model.mlp import MLP

COUNTS = {
    "all": [90, 130, 7, 310],
    "ends without rows": [0, 1, 536, 0],
    "one": [0, 0, 0, 537],
    "few": [1, 2, 0, 4],
    "none": [0, 0, 0, 0],
    "short ends": [3, 80, 1, 2],
}
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def _build_experts(compose, activation: str, hidden: int, size: int, dtype) -> list[MLP]:
    overrides = [f"model.hidden_size={hidden}", f"model.mlp.activation={activation}"]
    heads = ["model.num_attention_heads=4", "model.num_key_value_heads=2"]
    model = resolve_config(compose("model=qwen3_moe_tiny", *heads, *overrides)).model
    experts = [MLP(model, size).to(dtype) for _ in range(4)]
    generator = torch.Generator().manual_seed(0)
    for expert in experts:
        for param in expert.parameters():
            param.data.normal_(std=0.2, generator=generator)
    return experts


def _run(apply, experts: list[MLP], rows, counts, gradient) -> list[torch.Tensor]:
    """Return outputs, and gradients of inputs and weights."""
    inputs = rows.clone().requires_grad_()
    params = [param for expert in experts for param in expert.parameters()]
    outputs = apply(experts, inputs, torch.tensor(counts))
    return [outputs.detach(), *torch.autograd.grad(outputs, [inputs, *params], gradient)]


def _apply_networks(experts: list[MLP], rows, counts) -> torch.Tensor:
    parts = torch.split(rows, counts.tolist())
    return torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])


@pytest.mark.parametrize("apply", [module._apply_grouped, module._apply_in_turn])
@pytest.mark.parametrize(
    ("hidden", "size", "dtype"),
    [
        *((32, 24, dtype) for dtype in TOLERANCES),
        *((64, 40, dtype) for dtype in TOLERANCES),
        (36, 20, torch.float32),  # not aligned in bf16
    ],
)
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_matmuls_equal_the_networks_of_experts(
    compose, apply, counts, activation, hidden, size, dtype
) -> None:
    experts = _build_experts(compose, activation, hidden, size, dtype)
    generator = torch.Generator().manual_seed(1)
    rows, gradient = torch.randn(2, sum(counts), hidden, generator=generator).to(dtype)
    found = _run(apply, experts, rows, counts, gradient)
    expected = _run(_apply_networks, experts, rows, counts, gradient)
    for one, other in zip(found, expected, strict=True):
        scale = float(other.abs().max()) if other.numel() else 0.0
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCES[dtype] * (scale + 1e-6))


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_windows_contain_the_rows_and_have_few_lengths(counts, dtype) -> None:
    windows = module._list_windows(torch.empty(sum(counts), 4, dtype=dtype), counts)
    assert [one.end - one.start for one in windows] == counts
    assert all(0 <= one.first <= one.start <= one.end <= one.last for one in windows)
    assert all(one.last <= sum(counts) for one in windows)
    if dtype is torch.float32:
        assert all((one.first, one.last) == (one.start, one.end) for one in windows)
    else:
        assert all((w.last - w.first) % 32 == 0 or w.last - w.first == sum(counts) for w in windows)


@pytest.mark.parametrize(
    ("hidden", "size", "num_rows", "dtype", "is_grouped"),
    [
        (32, 24, 512, torch.bfloat16, True),
        (32, 24, 511, torch.bfloat16, False),
        (36, 24, 512, torch.bfloat16, False),
        (32, 20, 512, torch.bfloat16, False),
        (32, 24, 512, torch.float32, False),
    ],
)
def test_small_or_unaligned_experts_run_in_turn(
    compose, monkeypatch, hidden, size, num_rows, dtype, is_grouped
) -> None:
    """Without alignment, a matmul is not grouped: 36 and 20 elements are no multiple of 16 bytes."""
    calls = []
    grouped_mm = module._grouped_mm

    def count(*args, **kwargs):
        calls.append(1)
        return grouped_mm(*args, **kwargs)

    monkeypatch.setattr(module, "_grouped_mm", count)
    experts = _build_experts(compose, "swiglu", hidden, size, dtype)
    counts = torch.tensor([num_rows, 0, 0, 0])
    rows = torch.randn(num_rows, hidden, dtype=dtype)
    assert apply_experts(experts, rows, counts).shape == (num_rows, hidden)
    assert not calls, "a CPU has no kernel"
    monkeypatch.setattr(module, "_DEVICES_WITHOUT_GROUPED_MM", ())
    assert apply_experts(experts, rows, counts).shape == (num_rows, hidden)
    assert len(calls) == (2 if is_grouped else 0)


def test_a_grouped_matmul_saves_no_copy_of_the_weights(compose) -> None:
    """The backward pass copies the weights again, so that layers do not accumulate copies."""
    experts = _build_experts(compose, "swiglu", 32, 24, torch.float32)
    weights = {param.data_ptr() for expert in experts for param in expert.parameters()}
    saved: list[torch.Tensor] = []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        module._apply_grouped(experts, torch.randn(8, 32), torch.tensor([2, 2, 2, 2]))
    others = [tensor for tensor in saved if tensor.data_ptr() not in weights]
    assert weights <= {tensor.data_ptr() for tensor in saved}
    assert sum(tensor.numel() for tensor in others if tensor.is_floating_point()) <= 8 * (
        32 + 3 * 24
    )
