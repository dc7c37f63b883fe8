"""Lion equals pytorch_optimizer.Lion over 50 steps in fp32."""

import pytest
import pytorch_optimizer
import torch

from hlat.config.optimizer import OptimizerConfig
from tests.support.optimizer_steps import (
    NUM_STEPS,
    build_ours,
    sample_gradients,
    sample_weights,
    train,
)

BETAS = (0.9, 0.99)


def train_both(lr: float, weight_decay: float):
    """Return optimizer and weights of hlat, then those of pytorch_optimizer, after all steps."""
    settings = OptimizerConfig(
        name="lion", lr=lr, beta1=BETAS[0], beta2=BETAS[1], weight_decay=weight_decay
    )
    ours, theirs = sample_weights(), sample_weights()
    optimizer = build_ours(settings, ours)
    reference = pytorch_optimizer.Lion(theirs, lr=lr, betas=BETAS, weight_decay=weight_decay)
    train(optimizer, ours, sample_gradients())
    train(reference, theirs, sample_gradients())
    return optimizer, ours, reference, theirs


def test_weights_and_momentum_are_bit_identical() -> None:
    """Choose powers of two, so that the factor of the decay is the same in fp32 and fp64."""
    optimizer, ours, reference, theirs = train_both(lr=2.0**-10, weight_decay=2.0**-3)
    for mine, other, initial in zip(ours, theirs, sample_weights(), strict=True):
        assert torch.equal(mine, other)
        assert torch.equal(optimizer.state[mine]["exp_avg"], reference.state[other]["exp_avg"])
        assert not torch.equal(mine, initial)


@pytest.mark.parametrize("lr", [3e-4, 1e-2])
def test_weights_differ_by_the_rounding_of_the_decay(lr: float) -> None:
    """Allow one rounding of a weight per step: hlat computes 1 - lr * decay in fp32."""
    optimizer, ours, reference, theirs = train_both(lr=lr, weight_decay=1.0)
    for mine, other in zip(ours, theirs, strict=True):
        size = float(mine.detach().abs().max())
        torch.testing.assert_close(mine, other, rtol=0, atol=NUM_STEPS * size * 2.0**-24)
        assert torch.equal(optimizer.state[mine]["exp_avg"], reference.state[other]["exp_avg"])
