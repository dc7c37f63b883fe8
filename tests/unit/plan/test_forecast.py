"""What follows from a step's time, worked by hand, and what is left out where it is not known."""

import pytest
from omegaconf import OmegaConf

from hlat.plan.forecast import forecast_run


@pytest.fixture
def planned(compose):
    return lambda *overrides: forecast_run(OmegaConf.to_object(compose(*overrides)))


def test_days_cost_and_cores_of_hlat_7b(planned):
    plan = planned("experiment=hlat_7b")
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


def test_a_save_is_written_by_all_nodes_and_stops_training_while_it_is_copied(planned):
    saves = planned("experiment=hlat_7b").checkpointing
    assert saves.size == 6_738_415_616 * 6
    assert saves.write_s == pytest.approx(saves.size / 64 / 1e9)
    assert saves.stall_s == pytest.approx(saves.write_s / 10)
    alone = planned("experiment=hlat_7b", "checkpoint.asynchronous=false").checkpointing
    assert alone.stall_s == alone.write_s == saves.write_s


def test_the_best_interval_is_that_of_failures(planned):
    plan = planned("experiment=hlat_7b", "checkpoint.asynchronous=false")
    saves, step = plan.checkpointing, plan.throughput.step.total
    # sqrt(2 s M), M = 2,950 h / 64 nodes
    young = (2 * saves.stall_s * 2950 * 3600 / 64) ** 0.5
    assert saves.best_steps * step == pytest.approx(young, rel=0.03)
    assert saves.every_steps == 1000
    assert saves.best_goodput > saves.goodput > 0.97


def test_an_interval_that_no_run_gets_through_saves_nothing(planned):
    saves = planned("experiment=hlat_7b", "checkpoint.every_steps=10_000_000").checkpointing
    assert saves.goodput == 0
    assert saves.best_goodput > 0.9


def test_a_price_that_is_not_known_costs_nothing_known(planned):
    plan = planned("experiment=hlat_7b", "hardware=trn1n_32xl", "hardware.nodes=64")
    assert plan.throughput.cost_usd is None
    assert plan.throughput.cost_per_4m_tokens_usd is None
    assert plan.throughput.days > 0


def test_hardware_without_constants_has_memory_alone(planned):
    plan = planned("model=7b", "hardware=trn2_48xl")
    assert plan.throughput is None
    assert plan.checkpointing is None
    assert "hardware=trn2.48xlarge has no constants" in plan.unknown_reasons[0]
    assert plan.memory.total > 0
