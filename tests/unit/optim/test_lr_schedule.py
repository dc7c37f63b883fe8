"""Learning rates compared with the released scheduler and the schedulers of torch and
transformers."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    SequentialLR,
)
from transformers.optimization import get_inverse_sqrt_schedule, get_wsd_schedule

from hlat.config.batch import BatchConfig
from hlat.config.optimizer import OptimizerConfig
from hlat.config.phase import PhaseConfig, PhaseStage
from hlat.config.run import Config
from hlat.config.schedule import PowerConfig, ScheduleConfig
from hlat.optim.lr_schedule import compute_lr, compute_schedule_lr

HLAT = ScheduleConfig("hlat", warmup_steps=2000, total_steps=500_000, min_lr_ratio=0.1)
COSINE = ScheduleConfig("cosine", warmup_steps=10, total_steps=110, min_lr_ratio=0.1)
CONSTANT = ScheduleConfig("constant", warmup_steps=10, total_steps=110, min_lr_ratio=None)
LINEAR = ScheduleConfig("linear", warmup_steps=10, total_steps=110, min_lr_ratio=0.1)
WSD = ScheduleConfig("wsd", warmup_steps=10, total_steps=110, min_lr_ratio=0.1, decay_steps=20)
ALL = [CONSTANT, COSINE, HLAT, LINEAR, WSD]
DECAYING = [COSINE, HLAT, LINEAR, WSD]


def named(schedule: ScheduleConfig) -> str:
    return schedule.name


@st.composite
def schedules(draw: st.DrawFn) -> ScheduleConfig:
    """Generate a valid schedule."""
    shape = draw(st.sampled_from(["constant", "cosine", "hlat", "linear", "wsd"]))
    warmup = draw(st.integers(0, 300))
    decay = draw(st.integers(1, 300))
    total = warmup + decay + draw(st.integers(0, 300))
    floor = None if shape == "constant" else draw(st.floats(0, 1))
    decay_steps = decay if shape == "wsd" else None
    return ScheduleConfig(shape, warmup, total, min_lr_ratio=floor, decay_steps=decay_steps)


def rates_of(schedule: ScheduleConfig, peak: float = 1.0) -> list[float]:
    return [compute_schedule_lr(step, schedule, peak) for step in range(schedule.total_steps + 1)]


def rates_by(
    make: Callable[[torch.optim.Optimizer], LRScheduler], steps: int, peak: float
) -> list[float]:
    """Return the rates that another scheduler sets in its optimizer."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR passes the deprecated epoch argument
        scheduler = make(optimizer)
        for _ in range(steps):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
    return rates


def test_hlat_warm_up_starts_at_zero() -> None:
    assert compute_schedule_lr(0, HLAT, 3e-4) == 0
    assert compute_schedule_lr(1, HLAT, 3e-4) == pytest.approx(3e-4 / 2000)
    assert compute_schedule_lr(2000, HLAT, 3e-4) == pytest.approx(3e-4)


def test_hlat_reaches_its_floor_at_step_397_994() -> None:
    assert compute_schedule_lr(397_993, HLAT, 1.0) > 0.1
    assert compute_schedule_lr(397_994, HLAT, 1.0) == 0.1
    assert compute_schedule_lr(429_153, HLAT, 1.0) == 0.1


def test_hlat_70b_at_the_start_of_upsampling() -> None:
    assert compute_schedule_lr(333_786, HLAT, 1.5e-4) == pytest.approx(3.76e-5, rel=2e-3)


def test_hlat_is_the_released_formula() -> None:
    for step in range(2000, 500_000, 9973):
        released = max(0.1, 0.5 * (1 + math.cos(math.pi * (step - 2000) / 498_000)))
        assert compute_schedule_lr(step, HLAT, 1.5e-4) == pytest.approx(
            1.5e-4 * released, rel=1e-12
        )


def test_cosine_warm_up_ends_at_the_peak() -> None:
    assert compute_schedule_lr(0, COSINE, 1.0) == pytest.approx(0.1)
    assert compute_schedule_lr(9, COSINE, 1.0) == 1.0
    assert compute_schedule_lr(10, COSINE, 1.0) == 1.0


def test_cosine_reaches_its_floor_at_the_horizon() -> None:
    assert compute_schedule_lr(60, COSINE, 1.0) == pytest.approx(0.55)
    assert compute_schedule_lr(109, COSINE, 1.0) > 0.1
    assert compute_schedule_lr(110, COSINE, 1.0) == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", DECAYING, ids=named)
def test_stays_at_the_floor_past_the_horizon(schedule: ScheduleConfig) -> None:
    for past in (0, 1, 10**6):
        rate = compute_schedule_lr(schedule.total_steps + past, schedule, 1.0)
        assert rate == pytest.approx(0.1)


def after_torchs_warm_up(schedule: ScheduleConfig, make_decay):
    """Torch's linear warm-up from the peak over warmup_steps, then another scheduler."""

    def make(optimizer: torch.optim.Optimizer) -> LRScheduler:
        warmup = schedule.warmup_steps
        rise = LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup - 1)
        return SequentialLR(optimizer, [rise, make_decay(optimizer)], milestones=[warmup])

    return make


TORCHS = [
    (CONSTANT, lambda optimizer: ConstantLR(optimizer, factor=1.0)),
    (COSINE, lambda optimizer: CosineAnnealingLR(optimizer, T_max=100, eta_min=0.1 * 3e-4)),
    (LINEAR, lambda optimizer: LinearLR(optimizer, 1.0, end_factor=0.1, total_iters=100)),
]


@pytest.mark.parametrize(("schedule", "decay"), TORCHS, ids=["constant", "cosine", "linear"])
def test_rates_equal_torch(schedule: ScheduleConfig, decay) -> None:
    expected = rates_by(after_torchs_warm_up(schedule, decay), 111, 3e-4)
    assert rates_of(schedule, 3e-4) == pytest.approx(expected, rel=1e-9)


def test_wsd_after_warm_up_equals_transformers() -> None:
    """Compare from the end of warm-up, which transformers computes as step / warmup_steps."""
    expected = rates_by(
        lambda optimizer: get_wsd_schedule(
            optimizer, 10, 20, num_training_steps=110, decay_type="1-sqrt", min_lr_ratio=0.1
        ),
        130,
        3e-4,
    )
    found = [compute_schedule_lr(step, WSD, 3e-4) for step in range(130)]
    assert found[10:] == pytest.approx(expected[10:], rel=1e-12)


def test_inverse_sqrt_equals_transformers() -> None:
    """The steps of transformers are counted from 0, those of the paper from 1."""
    schedule = ScheduleConfig("inverse_sqrt", warmup_steps=10, total_steps=110, min_lr_ratio=0.1)
    expected = rates_by(lambda one: get_inverse_sqrt_schedule(one, 10, 10), 1500, 3e-4)
    found = [compute_schedule_lr(step, schedule, 3e-4) for step in range(1499)]
    assert found == pytest.approx([max(3e-5 * (n >= 9), r) for n, r in enumerate(expected[1:])])
    assert found[998] > 3e-5
    assert found[999] == found[-1] == pytest.approx(3e-5)


def test_power_is_the_formula_of_the_paper() -> None:
    """min(peak, a x batch x tokens^b) with the values of arXiv 2408.13359, section 4."""
    a, b, peak, batch, tokens_per_step = 4.6, -0.51, 0.02, 128, 128 * 4096
    start = round((peak / (a * batch)) ** (1 / b) / tokens_per_step)
    schedule = ScheduleConfig(
        *("power", 1, 100_000),
        min_lr_ratio=0.0,
        decay_steps=10_000,
        power=PowerConfig(exponent=b, start_step=start),
    )
    for step in (0, 100, start + 100, 50_000, 89_999):
        expected = min(peak, a * batch * ((step + 1) * tokens_per_step) ** b)
        assert compute_schedule_lr(step, schedule, peak) == pytest.approx(expected, rel=2e-2)
    at_start_of_decay = compute_schedule_lr(90_000, schedule, peak)
    halfway = compute_schedule_lr(95_000, schedule, peak)
    assert halfway == pytest.approx(at_start_of_decay / 2 * (95_001 / 90_001) ** b)
    assert compute_schedule_lr(100_000, schedule, peak) == 0


@pytest.mark.parametrize("schedule", ALL, ids=named)
def test_first_and_last_step(schedule: ScheduleConfig) -> None:
    first = 0 if schedule is HLAT else 1 / schedule.warmup_steps
    assert compute_schedule_lr(0, schedule, 1.0) == first
    assert compute_schedule_lr(schedule.warmup_steps, schedule, 1.0) == 1.0
    last = compute_schedule_lr(schedule.total_steps - 1, schedule, 1.0)
    if schedule in (HLAT, CONSTANT):
        assert last == (0.1 if schedule is HLAT else 1.0)
    else:
        assert 0.1 < last < 0.32


@given(schedules())
def test_rates_rise_in_warm_up_and_never_after(schedule: ScheduleConfig) -> None:
    rates, warmup = rates_of(schedule), schedule.warmup_steps
    assert rates[: warmup + 1] == sorted(rates[: warmup + 1])
    falling = rates[warmup:]
    assert all(after <= before + 1e-12 for before, after in pairwise(falling))


@given(schedules())
def test_rates_are_between_floor_and_peak_and_end_at_the_floor(schedule: ScheduleConfig) -> None:
    rates = rates_of(schedule)
    floor = 1.0 if schedule.min_lr_ratio is None else schedule.min_lr_ratio
    assert rates[schedule.warmup_steps] == pytest.approx(1.0)
    assert max(rates) <= 1 + 1e-12
    assert min(rates[schedule.warmup_steps :]) >= floor - 1e-12
    for past in (0, 1, 10**6):
        end = compute_schedule_lr(schedule.total_steps + past, schedule, 1.0)
        assert end == pytest.approx(floor, abs=1e-12)


@given(schedules())
def test_rates_have_no_jumps(schedule: ScheduleConfig) -> None:
    """Check that no step is larger than the formula of its shape allows."""
    rates, warmup = rates_of(schedule), schedule.warmup_steps
    decay = schedule.decay_steps or schedule.total_steps - warmup
    steepest = {
        "constant": 0.0,
        "linear": 1 / decay,
        "cosine": math.pi / 2 / decay,
        "hlat": math.pi / 2 / decay,
        "wsd": math.sqrt(1 / decay),
    }[schedule.name]
    for step, (before, after) in enumerate(pairwise(rates)):
        most = 1 / warmup if step < warmup else steepest
        assert abs(after - before) <= most + 1e-9, step


@given(schedules(), st.floats(1e-6, 1e-1))
def test_rates_are_proportional_to_the_peak(schedule: ScheduleConfig, peak: float) -> None:
    expected = [peak * rate for rate in rates_of(schedule)]
    assert rates_of(schedule, peak) == pytest.approx(expected, rel=1e-12)


def test_wsd_is_constant_until_its_decay() -> None:
    assert rates_of(WSD)[9:91] == [1.0] * 82
    assert compute_schedule_lr(95, WSD, 1.0) == pytest.approx(0.1 + 0.9 * 0.5)


@pytest.mark.parametrize("schedule", ALL, ids=named)
def test_no_warm_up(schedule: ScheduleConfig) -> None:
    without = replace(schedule, warmup_steps=0, total_steps=30)
    assert compute_schedule_lr(0, without, 1.0) == 1.0


def test_horizon_within_warm_up() -> None:
    assert compute_schedule_lr(5, ScheduleConfig("cosine", 5, 5), 1.0) == 1.0
    assert compute_schedule_lr(6, ScheduleConfig("cosine", 5, 5), 1.0) == pytest.approx(0.1)


def run_with(*stages: PhaseStage, schedule: ScheduleConfig = COSINE) -> Config:
    """Return a configuration of 10 tokens per step."""
    batch = BatchConfig(global_batch_size=2, micro_batch_size=1, sequence_length=5)
    phase = PhaseConfig("test", list(stages))
    return Config(batch=batch, phase=phase, optimizer=OptimizerConfig(lr=3e-4), schedule=schedule)


def test_a_stage_without_a_rate_follows_the_schedule() -> None:
    config = run_with(PhaseStage("first", tokens=300), PhaseStage("second"))
    for step in range(115):
        assert compute_lr(step, config) == compute_schedule_lr(step, COSINE, 3e-4)


def test_a_stage_with_a_rate_does_not_shift_the_schedule() -> None:
    stages = PhaseStage("first", 300), PhaseStage("own", 200, lr=7e-5), PhaseStage("last")
    config = run_with(*stages)
    for step in range(110):
        expected = 7e-5 if 30 <= step < 50 else compute_schedule_lr(step, COSINE, 3e-4)
        assert compute_lr(step, config) == expected, step


def test_a_stage_moves_to_the_rate_at_its_end() -> None:
    stages = (
        PhaseStage("first", 600),
        PhaseStage("anneal", 200, lr=2e-4, end_lr=0.0),
        PhaseStage("last", 100),
    )
    config = run_with(*stages, schedule=CONSTANT)
    assert compute_lr(59, config) == 3e-4
    assert compute_lr(60, config) == 2e-4
    assert compute_lr(70, config) == pytest.approx(1e-4)
    assert compute_lr(79, config) == pytest.approx(1e-5)
    assert compute_lr(80, config) == 3e-4


def test_a_stage_may_warm_up_again() -> None:
    config = run_with(
        PhaseStage("first", 600),
        PhaseStage("warm", 100, lr=0.0, end_lr=1e-4),
        PhaseStage("last"),
    )
    assert [compute_lr(step, config) for step in (60, 65)] == pytest.approx([0.0, 5e-5])


@pytest.mark.parametrize("tokens", [None, 500])
def test_the_last_stage_ends_with_its_tokens_or_with_the_horizon(tokens: int | None) -> None:
    config = run_with(PhaseStage("first", 600), PhaseStage("anneal", tokens, lr=1e-4, end_lr=1e-5))
    assert compute_lr(85, config) == pytest.approx(5.5e-5)
    assert compute_lr(109, config) == pytest.approx(1.18e-5)
    assert compute_lr(110, config) == pytest.approx(1e-5)
    assert compute_lr(10**6, config) == pytest.approx(1e-5)


def test_end_rate_equals_the_start_of_the_next_stage() -> None:
    config = run_with(
        PhaseStage("a", 600, lr=2e-4, end_lr=1e-4),
        PhaseStage("b", 333, lr=1e-4, end_lr=0.0),
        PhaseStage("c"),
    )
    rates = [compute_lr(step, config) for step in range(94)]
    steps = [abs(after - before) for before, after in pairwise(rates)]
    assert max(steps[:93]) < 1e-4 / 33


def test_a_stage_of_the_papers_70b_run() -> None:
    """Check that both stages of the preset follow the released schedule."""
    batch = BatchConfig(global_batch_size=1024, micro_batch_size=1, sequence_length=4096)
    phase = PhaseConfig(
        "hlat_70b", [PhaseStage("base", int(1.4e12)), PhaseStage("upsampled", int(400e9))]
    )
    optimizer = OptimizerConfig(lr=1.5e-4)
    config = Config(batch=batch, phase=phase, optimizer=optimizer, schedule=HLAT)
    assert compute_lr(333_786, config) == pytest.approx(3.76e-5, rel=2e-3)
    assert compute_lr(429_153, config) == pytest.approx(1.5e-5)
