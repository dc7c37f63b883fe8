"""AdEMAMix equals pytorch_optimizer.AdEMAMix over 50 steps in fp32."""

import math

import pytest
import pytorch_optimizer
import torch

from hlat.config.config_errors import ConfigError
from hlat.config.optimizer import OptimizerConfig
from hlat.config.resolve import resolve_config
from hlat.optim.ademamix import compute_mixture
from hlat.optim.ademamix_spec import AdEMAMixConfig
from tests.support.optimizer_steps import (
    NUM_STEPS,
    build_ours,
    sample_gradients,
    sample_weights,
    train,
)

LR, DECAY, ALPHA, BETA3 = 1e-2, 0.1, 5.0, 0.999


@pytest.mark.parametrize("warmup_steps", [None, 30, 500])
def test_weights_and_state_are_those_of_pytorch_optimizer(warmup_steps: int | None) -> None:
    """Allow two roundings of the largest weight per step, and of the largest average."""
    settings = OptimizerConfig(
        name="ademamix",
        lr=LR,
        weight_decay=DECAY,
        ademamix=AdEMAMixConfig(ALPHA, BETA3, warmup_steps),
    )
    ours, theirs = sample_weights(), sample_weights()
    optimizer = build_ours(settings, ours)
    reference = pytorch_optimizer.AdEMAMix(
        theirs,
        lr=LR,
        betas=(settings.beta1, settings.beta2, BETA3),
        weight_decay=DECAY,
        weight_decouple=True,
        alpha=ALPHA,
        t_alpha_beta3=warmup_steps,
    )
    train(optimizer, ours, sample_gradients())
    train(reference, theirs, sample_gradients())
    for mine, other, initial in zip(ours, theirs, sample_weights(), strict=True):
        mine_state, other_state = optimizer.state[mine], reference.state[other]
        pairs = [(mine.detach(), other.detach())]
        pairs += [(mine_state[key], other_state[key]) for key in other_state]
        for found, expected in pairs:
            size = float(expected.abs().max())
            tolerance = 2 * NUM_STEPS * size * 2.0**-24
            torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
        assert torch.equal(mine_state["exp_avg"], other_state["exp_avg"])
        assert float((mine.detach() - initial.detach()).abs().max()) > 0.1


def test_the_half_life_of_the_slow_average_increases_linearly() -> None:
    group = {"alpha": 8.0, "beta3": 0.9999, "warmup_steps": 1000, "betas": (0.9, 0.999)}
    first, last = (math.log(0.5) / math.log(beta) for beta in (0.9, 0.9999))
    for count in (1, 500, 1000, 2000):
        alpha, share = compute_mixture(torch.tensor(float(count), dtype=torch.float64), group)
        progress = min(1.0, count / 1000)
        half_life = math.log(0.5) / math.log1p(-float(share))
        assert half_life == pytest.approx(first + progress * (last - first), rel=1e-9)
        assert float(alpha) == pytest.approx(8 * progress)
    _, share = compute_mixture(torch.tensor(2000.0), group)
    assert float(share) == pytest.approx(1e-4, rel=1e-6)  # 1 - 0.9999 is 1.0002e-4 in fp32


def test_the_preset_has_warm_ups_over_the_run(compose) -> None:
    config = resolve_config(compose("optimizer=ademamix", "schedule.total_steps=300"))
    assert config.optimizer.ademamix.warmup_steps == 300
    with pytest.raises(ConfigError) as error:
        resolve_config(compose("optimizer=ademamix", "optimizer.beta1=0"))
    (problem,) = error.value.problems
    assert "from optimizer.beta1=0.0 to optimizer.ademamix.beta3=0.9999; use a beta1" in problem
