"""Formulas against manual examples and stepwise runs, and trials against formulas.

Samples are seeded. The tolerance is four standard errors, which one in 16,000 samples exceeds.
"""

import math
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hlat.config.config_errors import ConfigError
from hlat.plan import failure_model
from hlat.plan.failure_model import (
    PUBLISHED_UPTIME,
    SCENARIOS,
    FailureScenario,
    TimeBreakdown,
    build_scenario,
)

NUM_ERRORS = 4
QUIET = FailureScenario(
    nodes=4,
    mtbf_h=40,
    detect_s=60,
    response_s=600,
    restart_s=120,
    load_s=60,
    save_stall_s=10,
    save_write_s=0,
    step_s=5,
    every_steps=100,
    steps=20_000,
)
SCENES = {
    "quiet": QUIET,
    "asynchronous": replace(QUIET, save_stall_s=1, save_write_s=400),
    "written just before the next": replace(QUIET, save_stall_s=1, save_write_s=500),
    "fails in every interval": replace(QUIET, mtbf_h=0.6, save_write_s=200, steps=1000),
    "restarts fail": replace(QUIET, mtbf_h=1, restart_s=900, save_write_s=100, steps=1000),
    "one interval": replace(QUIET, mtbf_h=1, save_write_s=300, steps=100),
}
LLAMA_3 = FailureScenario(1, 3, 60, 0, 40, 20, 1, 0, 1, 147, 100_000)


class StepwiseRun:
    """Run that simulates every step, with a clock for every node."""

    def __init__(self, scenario: FailureScenario, seed: int) -> None:
        self.scenario, self.random = scenario, random.Random(seed)
        self.clocks = [self.sample_failure_time() for _ in range(scenario.nodes)]
        self.wall_time = self.restarting = 0.0
        self.failures = self.step = self.durable_step = 0
        self.write_remaining_s = math.inf  # seconds until the newest checkpoint is durable
        while self.durable_step < scenario.steps:
            if not self.train_step():
                self.recover()

    def sample_failure_time(self) -> float:
        return self.random.expovariate(1 / (self.scenario.mtbf_h * 3600))

    def advance(self, seconds: float) -> bool:
        """Advance the time by a period in which nodes can fail; return False after a failure."""
        until_failure = min(self.clocks)
        passed = min(seconds, until_failure)
        self.wall_time += passed
        self.clocks = [clock - passed for clock in self.clocks]
        self.write_remaining_s -= passed
        if until_failure > seconds:
            if self.write_remaining_s <= 1e-9:
                self.durable_step, self.write_remaining_s = self.saved_step, math.inf
            return True
        self.clocks[self.clocks.index(min(self.clocks))] = self.sample_failure_time()
        return False

    def train_step(self) -> bool:
        """Execute a step, in two parts if a write ends in it, and save at the interval."""
        scenario = self.scenario
        if self.step < scenario.steps:
            before = min(self.write_remaining_s, scenario.step_s)
            if not (self.advance(before) and self.advance(scenario.step_s - before)):
                return False
            self.step += 1
            if self.step % scenario.every_steps:
                return True
        if self.write_remaining_s == math.inf:
            if not self.advance(scenario.save_stall_s):
                return False
            self.saved_step, self.write_remaining_s = self.step, scenario.save_write_s
            if self.write_remaining_s == 0:
                self.durable_step, self.write_remaining_s = self.saved_step, math.inf
        return self.step < scenario.steps or self.advance(
            min(self.write_remaining_s, scenario.save_write_s)
        )

    def recover(self) -> None:
        scenario = self.scenario
        self.step, self.write_remaining_s = self.durable_step, math.inf
        while True:
            self.failures += 1
            self.wall_time += scenario.detect_s + scenario.response_s
            before = self.wall_time
            restarted = self.advance(scenario.restart_s + scenario.load_s)
            self.restarting += self.wall_time - before
            if restarted:
                return


def assert_agree(values: "np.ndarray | list[float]", expected: float) -> None:
    error = np.std(values) / math.sqrt(len(values))
    assert np.mean(values) == pytest.approx(expected, abs=NUM_ERRORS * error + 1e-6)


def test_goodput_of_the_documented_example():
    assert failure_model.compute_young_interval(LLAMA_3) == pytest.approx(math.sqrt(2 * 10_800))
    assert failure_model.approximate_goodput(LLAMA_3, 147) == pytest.approx(
        1 - 1 / 147 - (73.5 + 120) / 10_800, rel=1e-12
    )
    assert failure_model.approximate_goodput(LLAMA_3, 147) == pytest.approx(0.9753, abs=5e-5)
    assert failure_model.compute_goodput(LLAMA_3, 147) == pytest.approx(0.9756, abs=5e-5)
    assert (
        failure_model.find_best_interval_steps(LLAMA_3) == 146
    )  # Young's 147 minus a third of the stall


def test_wall_time_without_idle_and_write_times_equals_daly():
    scenario = replace(QUIET, detect_s=0, response_s=0)
    m, tau, stall, restart = 36_000, 500, 10, 180
    wall = m * math.exp(restart / m) * math.expm1((tau + stall) / m) * 20_000 * 5 / tau
    assert failure_model.compute_expected_times(scenario).training / failure_model.compute_goodput(
        scenario, tau
    ) == pytest.approx(wall, rel=1e-12)


def test_goodput_with_rare_failures_equals_the_approximation():
    scenario = replace(QUIET, mtbf_h=40_000, save_stall_s=0, save_write_s=300)
    for interval in (400, 500, 2000):
        lost = 1 - failure_model.compute_goodput(scenario, interval)
        assert lost == pytest.approx(
            1 - failure_model.approximate_goodput(scenario, interval), rel=1e-4
        )


@pytest.mark.parametrize("scene", SCENES)
def test_goodput_of_a_long_run_equals_its_expected_times(scene):
    scenario = replace(SCENES[scene], steps=10**9)
    ledger = failure_model.compute_expected_times(scenario)
    assert ledger.training / ledger.wall_time == pytest.approx(
        failure_model.compute_goodput(scenario, scenario.interval_s), rel=1e-6
    )


def test_failures_lose_the_duration_of_a_slow_write():
    quick = replace(QUIET, mtbf_h=4000, steps=2_000_000)
    slow = replace(quick, save_write_s=400)
    lost = [failure_model.compute_expected_times(scenario) for scenario in (quick, slow)]
    per_failure = [ledger.lost / ledger.failures for ledger in lost]
    assert per_failure[1] - per_failure[0] == pytest.approx(400, rel=0.001)


@pytest.mark.parametrize("scene", ["quiet", "fails in every interval", "restarts fail"])
def test_best_interval_maximizes_the_goodput(scene):
    scenario = SCENES[scene]
    intervals = np.geomspace(1, 1e5, 200_001)
    peak = intervals[
        np.argmax([failure_model.compute_goodput(scenario, float(tau)) for tau in intervals])
    ]
    assert failure_model.find_best_interval(scenario) == pytest.approx(peak, rel=1e-3)


@pytest.mark.parametrize(("mtbf_h", "minutes"), [(24, 117), (6, 57), (0.25, 9.1)])
def test_daly_intervals_equal_published_ones(mtbf_h, minutes):
    """Use the captions of Daly's figures 3 to 5: a dump of 5 minutes, a restart of 10."""
    scenario = replace(LLAMA_3, mtbf_h=mtbf_h, save_stall_s=300, restart_s=600, load_s=0)
    assert failure_model.compute_daly_interval(scenario) / 60 == pytest.approx(minutes, rel=0.006)


def test_daly_is_more_accurate_than_young():
    best = failure_model.find_best_interval(QUIET)
    assert failure_model.compute_daly_interval(QUIET) == pytest.approx(best, rel=1e-5)
    assert failure_model.compute_young_interval(QUIET) == pytest.approx(best, rel=0.02)
    assert failure_model.compute_young_interval(QUIET) != pytest.approx(best, rel=0.005)
    endless_save = replace(QUIET, save_stall_s=3 * QUIET.mtbf_s)
    assert failure_model.compute_daly_interval(endless_save) == QUIET.mtbf_s


def test_best_interval_steps_are_limited_by_the_write_and_the_run():
    assert failure_model.find_best_interval_steps(replace(QUIET, save_stall_s=0)) == 1
    assert (
        failure_model.find_best_interval_steps(replace(QUIET, save_stall_s=0, save_write_s=401))
        == 81
    )
    assert failure_model.find_best_interval_steps(replace(QUIET, mtbf_h=1e12)) == QUIET.steps


@pytest.mark.parametrize("scene", SCENES)
def test_trials_agree_with_the_formula(scene):
    scenario = SCENES[scene]
    trials, expected = (
        failure_model.simulate_failures(scenario, 4000, seed=7),
        failure_model.compute_expected_times(scenario),
    )
    for part, value in {
        **vars(expected),
        "wall_time": expected.wall_time,
        "uptime": expected.uptime,
    }.items():
        assert_agree(getattr(trials, part), value)
    for part in ("uptime", "training"):
        fraction, error = failure_model.compute_pooled_fraction(
            getattr(trials, part), trials.wall_time
        )
        expected_fraction = getattr(expected, part) / expected.wall_time
        assert fraction == pytest.approx(expected_fraction, abs=NUM_ERRORS * error)


@pytest.mark.parametrize(
    "scene",
    [
        pytest.param("fails in every interval", marks=pytest.mark.slow),
        "restarts fail",
        "one interval",
    ],
)
def test_stepwise_runs_agree_with_the_formula(scene):
    scenario = replace(SCENES[scene], steps=min(SCENES[scene].steps, 500))
    runs, expected = (
        [StepwiseRun(scenario, seed) for seed in range(400)],
        failure_model.compute_expected_times(scenario),
    )
    assert_agree([run.wall_time for run in runs], expected.wall_time)
    assert_agree([run.failures for run in runs], expected.failures)
    assert_agree([run.restarting for run in runs], expected.restarting)


@pytest.mark.slow
def test_standard_error_equals_that_of_repetitions():
    fractions, errors = [], []
    for seed in range(300):
        trials = failure_model.simulate_failures(SCENES["restarts fail"], 100, seed)
        fraction, error = failure_model.compute_pooled_fraction(trials.training, trials.wall_time)
        fractions.append(fraction)
        errors.append(error)
    assert np.mean(errors) == pytest.approx(np.std(fractions), rel=0.2)


def test_no_failures_without_failing_nodes():
    scenario = replace(QUIET, mtbf_h=1e12, save_write_s=30, steps=10_050)
    trials = failure_model.simulate_failures(scenario, 3, seed=0)
    assert not trials.failures.any()
    assert trials.wall_time == pytest.approx([101 * (500 + 10) + 30] * 3)


def test_trials_depend_on_the_seed_only():
    one, again, other = (
        failure_model.simulate_failures(QUIET, 50, seed).wall_time for seed in (1, 1, 2)
    )
    assert (one == again).all()
    assert (one != other).any()


def test_sums_of_a_time_breakdown():
    ledger = TimeBreakdown(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, failures=7.0)
    assert (ledger.wall_time, ledger.downtime, ledger.uptime) == (21, 15, 6)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"save_write_s": 501},
            "save_write_s=501 is longer than the 500 s from a save to the next; use every_steps=101 or more",
        ),
        (
            {"steps": 99},
            "every_steps=100 is more than steps=99, so no checkpoint would be saved; use",
        ),
        ({"mtbf_h": 0.01}, "the run would not end: from a restart to the next checkpoint is 690 s"),
        ({"mtbf_h": 0.1}, "trials=1000 of steps=20000 would simulate"),
    ],
)
def test_invalid_scenarios_are_rejected(change, problem):
    with pytest.raises(ConfigError) as caught:
        failure_model.validate_scenario(replace(QUIET, **change), 1000)
    assert [line for line in caught.value.problems if line.startswith(problem)]
    failure_model.validate_scenario(QUIET, 1000)


def test_published_uptimes_are_fitted_and_predicted():
    ledgers = {
        name: failure_model.compute_expected_times(build_scenario(name, {})[0])
        for name in SCENARIOS
    }
    uptime = {name: ledger.uptime / ledger.wall_time for name, ledger in ledgers.items()}
    assert uptime["manual"] == pytest.approx(PUBLISHED_UPTIME["manual"], abs=5e-5)
    assert uptime["automatic"] == pytest.approx(PUBLISHED_UPTIME["automatic"], abs=0.0015)


@pytest.mark.parametrize("name", SCENARIOS)
def test_published_uptimes_are_within_the_90_percent_interval(name):
    trials = failure_model.simulate_failures(build_scenario(name, {})[0], 2000, seed=0)
    low, high = np.percentile(trials.uptime / trials.wall_time, (5, 95))
    assert low < PUBLISHED_UPTIME[name] < high


def test_scenarios_differ_only_in_response_and_length():
    manual, automatic = SCENARIOS["manual"], SCENARIOS["automatic"]
    differing = {key for key in manual if manual[key] != automatic[key]}
    assert differing == {"detect_s", "response_s", "steps"}
    assert all(source for numbers in SCENARIOS.values() for _, source in numbers.values())


def test_manual_response_is_the_mean_wait_of_staffed_hours():
    hours = np.arange(0, 168, 0.001)
    starts = np.array([24 * day + 8 for day in (0, 1, 2, 3, 4, 7)])
    staffed = (hours % 24 >= 8) & (hours % 24 < 20) & (hours < 5 * 24)
    wait = np.where(staffed, 0, starts[np.searchsorted(starts, hours)] - hours)
    assert wait.mean() * 3600 + 1800 == pytest.approx(
        SCENARIOS["manual"]["response_s"][0], rel=0.01
    )


def test_fitted_failure_rate_is_between_those_of_llama_3():
    """Compare with 466 interruptions, 419 unexpected, of 16,384 accelerators in 54 days (arXiv
    2407.21783, section 3.3.4)."""
    accelerator_hours = 16_384 * 54 * 24
    fitted = SCENARIOS["manual"]["mtbf_h"][0] * 16
    assert accelerator_hours / 466 < fitted < accelerator_hours / 419


def test_the_documented_alternatives_meet_the_fitted_uptime():
    text = (Path(__file__).resolve().parents[3] / "benchmarks/planning/uptimes.md").read_text()
    rows = re.findall(
        r"^\| (\d+\.?\d*) h \| ([\d,]+) h \| ([\d,]+) h \| (\S+)% \|$", text, re.MULTILINE
    )
    assert len(rows) == 5
    for response_h, mtbf_h, accelerator_h, automatic in rows:
        mtbf, per_accelerator = (float(hours.replace(",", "")) for hours in (mtbf_h, accelerator_h))
        assert per_accelerator == pytest.approx(16 * mtbf, rel=0.005)
        overrides = {"manual": {"response_s": 3600 * float(response_h)}, "automatic": {}}
        wanted = {"manual": 77.83, "automatic": float(automatic)}
        for name in overrides:
            ledger = failure_model.compute_expected_times(
                build_scenario(name, {**overrides[name], "mtbf_h": mtbf})[0]
            )
            assert 100 * ledger.uptime / ledger.wall_time == pytest.approx(wanted[name], abs=0.02)
