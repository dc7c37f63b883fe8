"""Global norm of gradients."""

import pytest
import torch

from hlat.optim.gradient_norm import compute_global_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_is_accumulated_in_fp32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    large = [torch.randn((4096, 1100), generator=generator).to(dtype) for _ in range(3)]
    found = compute_global_norm(iter(large))
    expected = sum(float(t.double().square().sum()) for t in large) ** 0.5
    assert found.dtype == torch.float32
    assert found.shape == ()
    assert float(found) == pytest.approx(expected, rel=1e-6)
