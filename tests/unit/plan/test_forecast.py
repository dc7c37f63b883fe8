"""Forecasts from the step time against manual examples, and unknown values."""

import pytest
from omegaconf import OmegaConf

from hlat.plan.forecast import forecast_run


@pytest.fixture
def forecast(compose):
    return lambda *overrides: forecast_run(OmegaConf.to_object(compose(*overrides)))


def test_days_cost_and_cores_of_hlat_7b(forecast):
    plan = forecast("experiment=hlat_7b")
    throughput, step = plan.throughput, plan.throughput.step.total
    assert plan.steps == 429_154
    assert plan.tokens == 429_154 * 4_194_304
    assert throughput.tokens_per_second == 4_194_304 / step
    assert throughput.days == pytest.approx(429_154 * step / 86400)
    assert throughput.cost_usd == pytest.approx(429_154 * step / 3600 * 64 * 21.5)
    assert throughput.cost_per_4m_tokens_usd == pytest.approx(
        64 * 21.5 / 3600 * step / 4_194_304 * 4e6
    )
    assert throughput.loader_cores == pytest.approx(4_194_304 / step / 64 / 0.59e6)


def test_write_and_stall_times_of_a_checkpoint(forecast):
    saves = forecast("experiment=hlat_7b").checkpointing
    assert saves.size == 6_738_415_616 * 6
    assert saves.write_s == pytest.approx(saves.size / 64 / 1e9)
    assert saves.stall_s == pytest.approx(saves.write_s / 10)
    synchronous = forecast("experiment=hlat_7b", "checkpoint.asynchronous=false").checkpointing
    assert synchronous.stall_s == synchronous.write_s == saves.write_s


def test_best_checkpoint_interval_equals_that_of_the_failure_model(forecast):
    plan = forecast("experiment=hlat_7b", "checkpoint.asynchronous=false")
    saves, step = plan.checkpointing, plan.throughput.step.total
    # sqrt(2 s M), M = 2,950 h / 64 nodes
    young = (2 * saves.stall_s * 2950 * 3600 / 64) ** 0.5
    assert saves.best_steps * step == pytest.approx(young, rel=0.03)
    assert saves.every_steps == 1000
    assert saves.best_goodput > saves.goodput > 0.97


def test_goodput_of_an_excessive_interval_is_zero(forecast):
    saves = forecast("experiment=hlat_7b", "checkpoint.every_steps=10_000_000").checkpointing
    assert saves.goodput == 0
    assert saves.best_goodput > 0.9


def test_cost_without_a_price_is_none(forecast):
    plan = forecast("experiment=hlat_7b", "hardware=trn1n_32xl", "hardware.nodes=64")
    assert plan.throughput.cost_usd is None
    assert plan.throughput.cost_per_4m_tokens_usd is None
    assert plan.throughput.days > 0


def test_hardware_without_constants_has_memory_only(forecast):
    plan = forecast("model=7b", "hardware=trn3")
    assert plan.throughput is None
    assert plan.checkpointing is None
    assert "hardware=trn3 has no constants" in plan.unknown_reasons[0]
    assert plan.memory.total > 0


def test_intervals_of_step_times(forecast, compose):
    plan = forecast("model=llama3_8b", "hardware=h100_p5").throughput
    assert plan.is_calibrated
    low, high = (bound / plan.step.total for bound in plan.step_interval_s)
    assert (low, high) == pytest.approx((0.910, 1.099))
    experts = forecast("model=mixtral_8x7b", "hardware=h100_p5", "parallelism.zero=1").throughput
    assert not experts.is_calibrated
    low, high = (bound / experts.step.total for bound in experts.step_interval_s)
    assert (low, high) == pytest.approx((0.71, 1.41))
    assert not forecast("experiment=hlat_7b").throughput.is_calibrated
    config = OmegaConf.to_object(compose("model=llama3_8b", "hardware=h100_p5"))
    assert forecast_run(config, assumed_mfu=0.4).throughput.step_interval_s is None
