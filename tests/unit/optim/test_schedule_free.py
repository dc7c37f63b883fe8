"""Schedule-free AdamW equals schedulefree.AdamWScheduleFree over 50 steps in fp32."""

import pytest
import schedulefree
import torch

from hlat.config.config_errors import ConfigError
from hlat.config.optimizer import OptimizerConfig
from hlat.config.resolve import resolve_config
from hlat.optim.lr_schedule import compute_schedule_lr
from hlat.optim.optimizer_factory import set_lr
from hlat.optim.schedule_free import compute_average_weight
from hlat.optim.schedule_free_spec import ScheduleFreeConfig
from tests.support.optimizer_steps import (
    NUM_STEPS,
    build_ours,
    sample_gradients,
    sample_weights,
    train,
)

LR, DECAY, BETAS = 1e-2, 0.1, (0.9, 0.95)


def read_x(optimizer: torch.optim.Optimizer, weights) -> list[torch.Tensor]:
    """Return the averages of the reference, which computes them in evaluation mode."""
    optimizer.eval()
    averages = [weight.detach().clone() for weight in weights]
    optimizer.train()
    return averages


@pytest.mark.parametrize("warmup_steps", [0, 10])
def test_y_x_and_z_are_those_of_schedulefree(compose, warmup_steps: int) -> None:
    """Allow an absolute error of two roundings of the largest weight per step.

    The reference updates y in place and derives x from y and z, so that it divides the rounding
    errors of y by beta1; hlat stores x.
    """
    settings = OptimizerConfig(
        name="schedule_free",
        lr=LR,
        weight_decay=DECAY,
        schedule_free=ScheduleFreeConfig(warmup_steps),
    )
    ours, theirs = sample_weights(), sample_weights()
    optimizer = build_ours(settings, ours)
    for weight in ours:
        for key in ("z", "x"):
            optimizer.state[weight][key].copy_(weight.detach())
    reference = schedulefree.AdamWScheduleFree(
        theirs, lr=LR, betas=BETAS, weight_decay=DECAY, warmup_steps=warmup_steps
    )
    reference.train()
    schedule = resolve_config(
        compose("schedule=constant", f"schedule.warmup_steps={warmup_steps}")
    ).schedule
    train(
        optimizer,
        ours,
        sample_gradients(),
        lambda step: set_lr(optimizer, compute_schedule_lr(step, schedule, LR)),
    )
    train(reference, theirs, sample_gradients())
    for mine, other, x in zip(ours, theirs, read_x(reference, theirs), strict=True):
        size = float(other.detach().abs().max())
        tolerance = {"rtol": 0, "atol": 2 * NUM_STEPS * size * 2.0**-24}
        state = optimizer.state[mine]
        torch.testing.assert_close(mine, other, **tolerance)
        torch.testing.assert_close(state["x"], x, **tolerance)
        torch.testing.assert_close(state["z"], reference.state[other]["z"], **tolerance)
        assert float((state["x"] - mine.detach()).abs().max()) > 100 * tolerance["atol"]


@pytest.mark.parametrize("warmup_steps", [0, 1, 7])
def test_weights_of_the_average_are_squared_rates(warmup_steps: int) -> None:
    rates = [min(1.0, n / warmup_steps) if warmup_steps else 1.0 for n in range(1, 30)]
    for count in range(1, len(rates)):
        expected = rates[count - 1] ** 2 / sum(rate**2 for rate in rates[:count])
        found = compute_average_weight(torch.tensor(float(count)), warmup_steps)
        assert float(found) == pytest.approx(expected, rel=2**-22)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["schedule=tiny"],
            "schedule.name=cosine decays the learning rate, and optimizer.name=schedule_free "
            "averages the weights instead; use schedule=constant",
        ),
        (
            ["schedule=constant", "optimizer.schedule_free.warmup_steps=3"],
            "optimizer.schedule_free.warmup_steps=3 differs from schedule.warmup_steps=64; use "
            "optimizer=schedule_free, or set it to the same value",
        ),
        (
            ["schedule=constant", "optimizer.ema_decay=0.9"],
            "optimizer.ema_decay=0.9 is a second average of the weights, as "
            "optimizer.name=schedule_free averages them; use optimizer.ema_decay=null",
        ),
        (
            ["schedule=constant", "phase.timeline.0.lr=1e-3"],
            "phase.timeline.0.lr=0.001 changes the learning rate, and the average of "
            "optimizer.name=schedule_free is that of a constant one; set it to null",
        ),
    ],
)
def test_other_schedules_are_refused(compose, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_config(compose("optimizer=schedule_free", *overrides))
    assert error.value.problems == (message,)


def test_the_preset_has_the_warm_up_of_the_schedule(compose) -> None:
    config = resolve_config(
        compose("optimizer=schedule_free", "schedule=constant", "schedule.warmup_steps=7")
    )
    assert config.optimizer.schedule_free.warmup_steps == 7
