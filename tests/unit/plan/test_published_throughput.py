"""Predictions against published throughput, and the fit of the constants."""

import math
import statistics
from dataclasses import replace

import pytest

from hlat.config.mfu import compute_cost_per_4m_tokens
from hlat.config.resolve import resolve_config
from hlat.plan.achieved_speed import compute_achieved_speed
from hlat.plan.forecast import forecast_run
from hlat.plan.hardware_efficiency import load_efficiencies
from hlat.plan.step_time import compute_step_time, predict_step_time
from hlat.plan.token_cost import COMMON_OVERRIDES, PUBLISHED_RUNS

TRN1 = load_efficiencies()["trn1"]


@pytest.fixture(scope="module")
def configs(compose):
    """Resolve the configurations of all rows."""
    return {
        row.name: resolve_config(
            compose(*row.overrides, *COMMON_OVERRIDES, f"hardware.nodes={row.nodes}")
        )
        for row in PUBLISHED_RUNS
    }


def _predict_rate(config, constants=TRN1):
    return 1024 / compute_step_time(config, compute_achieved_speed(config, constants)).total


def test_at_most_half_of_the_rows_are_fitted():
    fitted = [row for row in PUBLISHED_RUNS if row.fitted]
    assert len(fitted) <= len(PUBLISHED_RUNS) / 2
    values = [
        sum(len(row.sequences_per_second) for row in rows) for rows in (fitted, PUBLISHED_RUNS)
    ]
    assert values[0] <= values[1] / 2


@pytest.mark.parametrize("row", PUBLISHED_RUNS, ids=lambda row: row.name)
def test_predictions_are_within_15_percent_of_published_medians(row, configs):
    error = _predict_rate(configs[row.name]) / statistics.median(row.sequences_per_second) - 1
    assert abs(error) < 0.15


@pytest.mark.parametrize("row", PUBLISHED_RUNS, ids=lambda row: row.name)
def test_published_runs_fit(row, configs):
    assert forecast_run(configs[row.name]).fits


@pytest.mark.parametrize("constant", ["compute", "link", "network"])
def test_constants_minimize_the_error(constant, configs):
    def error(constants):
        return sum(
            math.log(_predict_rate(configs[row.name], constants) / value) ** 2
            / len(row.sequences_per_second)
            for row in PUBLISHED_RUNS
            if row.fitted
            for value in row.sequences_per_second
        )

    best, value = error(TRN1), getattr(TRN1, constant)
    for factor in (0.98, 1.02):
        assert error(replace(TRN1, **{constant: factor * value})) > best


def test_predicted_scaling_at_32_and_64_nodes(configs):
    one = _predict_rate(configs["HLAT-7B, TP8 DP16"]) / 4
    assert _predict_rate(configs["HLAT-7B, TP8 DP128"]) / 32 / one == pytest.approx(0.87, abs=0.01)
    assert _predict_rate(configs["HLAT-7B, TP8 DP256"]) / 64 / one == pytest.approx(0.75, abs=0.01)


def test_70b_fits_the_nodes_of_the_paper_but_not_four(compose):
    four = resolve_config(
        compose("model=70b", "parallelism.pp=4", "hardware=trn1_32xl", "hardware.nodes=4")
    )
    assert not forecast_run(four).fits
    for experiment in ("hlat_7b", "hlat_70b"):
        assert forecast_run(resolve_config(compose(f"experiment={experiment}"))).fits


def test_cost_ratios_equal_those_of_figure_5(compose):
    def cost(*overrides):
        config = resolve_config(compose(*overrides))
        return compute_cost_per_4m_tokens(
            config.hardware, 4_194_304 / predict_step_time(config).total
        )

    trn1 = cost("model=7b", "hardware=trn1_32xl", "hardware.nodes=4")
    layout = ("model=7b", "precision=mixed", "parallelism.zero=1", "parallelism.tp=4")
    gpu = (*layout, "hardware=a100_p4d", "hardware.nodes=4")
    assert trn1 / cost(*gpu, "hardware.price_usd_per_hour=32.77") == pytest.approx(0.64, abs=0.01)
    assert trn1 / cost(*gpu) == pytest.approx(0.95, abs=0.01)  # at the price of November 2026
    large = cost("model=70b", "hardware=trn1_32xl", "hardware.nodes=32")
    small = cost("model=7b", "hardware=trn1_32xl", "hardware.nodes=32")
    assert large / small == pytest.approx(12, abs=0.2)
