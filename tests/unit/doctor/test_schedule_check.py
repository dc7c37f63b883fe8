"""The reference of the learning rate has the values of the published formulas."""

import math

import pytest

from hlat.config.resolve import resolve_config
from hlat.doctor.schedule_check import compute_reference_rate

PEAK = ["optimizer.lr=1", "schedule.warmup_steps=4", "schedule.total_steps=104"]
BATCH = ["batch.global_batch_size=2", "batch.micro_batch_size=2", "batch.sequence_length=64"]
TIMELINE = (
    "phase.timeline=[{name:a,tokens:1280},{name:b,tokens:1281,lr:0.5,end_lr:0.1},{name:c,lr:0.2}]"
)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("tiny", {0: 0.25, 3: 1.0, 4: 1.0, 54: 0.55, 79: 0.1 + 0.45 * (1 - math.sqrt(0.5))}),
        ("hlat", {0: 0.0, 3: 0.75, 4: 1.0, 54: 0.5, 103: 0.1}),
        ("linear", {0: 0.25, 4: 1.0, 54: 0.5, 103: 0.01}),
        ("constant", {0: 0.25, 4: 1.0, 103: 1.0}),
        ("wsd schedule.decay_steps=25", {4: 1.0, 79: 1.0, 80: 0.8, 104: 0.0}),
    ],
)
def test_rates_are_those_of_the_formulas(compose, schedule, rates) -> None:
    choice, *more = schedule.split()
    config = resolve_config(compose(f"schedule={choice}", *PEAK, *more))
    for step, rate in rates.items():
        assert compute_reference_rate(config, step) == pytest.approx(rate, abs=1e-12), step


def test_stages_start_at_the_first_step_after_their_tokens(compose) -> None:
    config = resolve_config(compose(*BATCH, *PEAK, TIMELINE))
    rates = [compute_reference_rate(config, step) for step in range(25)]
    assert rates[3] == 1.0
    # 1,280 tokens are 10 steps of 128, and 2,561 tokens end within step 20
    assert rates[10:12] == pytest.approx([0.5, 0.5 - 0.4 / 11])
    assert rates[20:22] == pytest.approx([0.5 - 0.4 * 10 / 11, 0.2])
