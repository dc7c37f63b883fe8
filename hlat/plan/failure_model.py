"""Cost of failures: uptime, goodput and the best interval between checkpoints.

    training -> failure -> detection -> response -> restart and load -> recomputation of lost steps

Nodes fail independently at a constant rate, so the rate of the system is the sum of theirs. The
expectation depends on the response time only through its mean, which gives exact formulas. The
simulation adds the spread between runs, since one run has few failures.

Sources: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9),
1974; J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
Future Generation Computer Systems 22(3), 2006.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from hlat.config.config_errors import ConfigError, raise_config_errors
from hlat.config.untrusted_files import load_untrusted_yaml

FloatOrArray = TypeVar("FloatOrArray", float, NDArray[np.float64])

RESPONSE_SIGMA = 1.0
"""Standard deviation of the logarithm of the response time, which is log-normal; assumed."""

PUBLISHED_UPTIME = {"manual": 0.7783, "automatic": 0.9881}
"""HLAT paper, section IV-B."""
_TABLES: dict[str, dict[str, Any]] = load_untrusted_yaml(
    Path(__file__).with_name("failure_scenarios.yaml")
)
SCENARIOS = {name: _TABLES["common"] | _TABLES[name] for name in PUBLISHED_UPTIME}
"""Value and source of every field of `FailureScenario`, by scenario."""
_MAX_CYCLE_IN_MTBFS = 20
_MAX_FAILURES_PER_TRIAL = 1e5
_MAX_FAILURES = 1e7


def _setting(meaning: str, positive: bool = False) -> Any:
    """Return a field that is a setting of `hlat plan failures` with this line in its help."""
    return field(metadata={"help": meaning, "positive": positive})


@dataclass(frozen=True)
class FailureScenario:
    """Run and its failures; times in seconds unless the name has `_h` for hours."""

    nodes: int = _setting("nodes that must all work", positive=True)
    mtbf_h: float = _setting("mean hours between failures of one node", positive=True)
    detect_s: float = _setting("seconds until a failure is detected")
    response_s: float = _setting("mean seconds until the restart begins (log-normal)")
    restart_s: float = _setting("seconds until processes have started; failures in this time count")
    load_s: float = _setting("seconds to load the checkpoint; failures in this time count")
    save_stall_s: float = _setting("seconds for which a save stops training")
    save_write_s: float = _setting("seconds from the stall until the checkpoint is durable")
    step_s: float = _setting("seconds of a training step", positive=True)
    every_steps: int = _setting("steps between saves", positive=True)
    steps: int = _setting("steps of the run, rounded up to whole intervals", positive=True)

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures of the whole system."""
        return self.mtbf_h * 3600 / self.nodes

    @property
    def interval_s(self) -> float:
        """Training time between two saves."""
        return self.every_steps * self.step_s

    @property
    def reload_s(self) -> float:
        """Part of a recovery during which nodes can fail."""
        return self.restart_s + self.load_s

    @property
    def idle_s(self) -> float:
        """Mean part of a recovery before the restart, which also repairs further failures."""
        return self.detect_s + self.response_s

    @property
    def num_intervals(self) -> int:
        """Checkpoints of the run, including the last at its end."""
        return -(-self.steps // self.every_steps)


@dataclass(frozen=True)
class TimeBreakdown(Generic[FloatOrArray]):
    """Parts of the wall time in seconds, of one run or per trial.

    Attributes:
        training: Steps that survive.
        saving: Stalls of saves that survive, and the write of the last.
        lost: Steps and stalls lost to failures.
        detecting: From failures to their detection.
        responding: From detection to the restart.
        restarting: Restart and load, including failed attempts.
        failures: Number of failures.
    """

    training: FloatOrArray
    saving: FloatOrArray
    lost: FloatOrArray
    detecting: FloatOrArray
    responding: FloatOrArray
    restarting: FloatOrArray
    failures: FloatOrArray

    @property
    def wall_time(self) -> FloatOrArray:
        """Sum of all parts."""
        return self.uptime + self.downtime

    @property
    def downtime(self) -> FloatOrArray:
        """Time from failures until training continues."""
        return self.detecting + self.responding + self.restarting

    @property
    def uptime(self) -> FloatOrArray:
        """Time outside of recoveries, including lost steps."""
        return self.training + self.saving + self.lost


def build_scenario(
    name: str, overrides: Mapping[str, float]
) -> tuple[FailureScenario, dict[str, str]]:
    """Return a scenario with overridden values, and the source of each value.

    Raises:
        ConfigError: If the scenario does not exist.
    """
    if name not in SCENARIOS:
        near = difflib.get_close_matches(name, SCENARIOS, 1)
        hint = f"did you mean {near[0]}?" if near else f"choices: {', '.join(SCENARIOS)}"
        raise ConfigError(f"scenario={name} does not exist; {hint}")
    numbers = SCENARIOS[name] | {key: (value, "given") for key, value in overrides.items()}
    scenario = FailureScenario(**{key: value for key, (value, _) in numbers.items()})
    return scenario, {key: source for key, (_, source) in numbers.items()}


def validate_scenario(scenario: FailureScenario, num_trials: int) -> None:
    """Raise ConfigError if the formulas do not apply or the simulation would not end."""
    problems = _find_save_problems(scenario) + _find_endless_run_problems(scenario, num_trials)
    raise_config_errors(problems)


def compute_goodput(scenario: FailureScenario, interval_s: float) -> float:
    """Return the exact fraction of a long run's time in steps that survive, for an interval.

    Daly's equation for the expected wall time with two further terms: the idle time D of each
    failure, without further failures, and the write time w, which acts as a longer restart.

        G = tau / ((M + D) exp((R + w) / M) (exp((tau + s) / M) - 1))
    """
    m = scenario.mtbf_s
    restart = math.exp((scenario.reload_s + scenario.save_write_s) / m)
    cycle_growth = math.expm1((interval_s + scenario.save_stall_s) / m)
    return interval_s / ((m + scenario.idle_s) * restart * cycle_growth)


def approximate_goodput(scenario: FailureScenario, interval_s: float) -> float:
    """Return 1 - s/tau - (tau/2 + w + D + R)/M, the goodput if failures are rare."""
    per_failure = scenario.save_write_s + scenario.idle_s + scenario.reload_s
    lost = (interval_s / 2 + per_failure) / scenario.mtbf_s
    return 1 - scenario.save_stall_s / interval_s - lost


def compute_expected_times(scenario: FailureScenario) -> TimeBreakdown[float]:
    """Return the exact expectation of each part of the run's time.

    A period x without failure takes V = M (exp(x / M) - 1) of working time with V / M failures
    (Wald). From the start to the first durable checkpoint x = tau + s + w, from one durable
    checkpoint to the next tau + s; after each failure R + tau + s + w.
    """
    m, n = scenario.mtbf_s, scenario.num_intervals
    write, cycle = scenario.save_write_s, scenario.interval_s + scenario.save_stall_s
    first = math.expm1((cycle + write) / m)
    later = math.expm1(cycle / m) * math.exp(write / m)
    working = m * math.exp(scenario.reload_s / m) * (first + (n - 1) * later)
    failures = working / m
    restarting = -working * math.expm1(-scenario.reload_s / m)
    return TimeBreakdown(
        training=n * scenario.interval_s,
        saving=n * scenario.save_stall_s + write,
        lost=working - restarting - n * cycle - write,
        detecting=failures * scenario.detect_s,
        responding=failures * scenario.response_s,
        restarting=restarting,
        failures=failures,
    )


def compute_young_interval(scenario: FailureScenario) -> float:
    """Return Young's optimum interval, sqrt(2 s M), in seconds."""
    return math.sqrt(2 * scenario.save_stall_s * scenario.mtbf_s)


def compute_daly_interval(scenario: FailureScenario) -> float:
    """Return Daly's optimum interval of higher order, in seconds."""
    stall, m = scenario.save_stall_s, scenario.mtbf_s
    if stall >= 2 * m:
        return m
    root = math.sqrt(stall / (2 * m))
    return compute_young_interval(scenario) * (1 + root / 3 + root**2 / 9) - stall


def find_best_interval(scenario: FailureScenario) -> float:
    """Return the interval in seconds with the highest goodput; 0 if saves do not stall.

    The derivative of the goodput is zero where 1 - tau/M = exp(-(tau + s) / M); D, R and w cancel.
    """
    m, low, high = scenario.mtbf_s, 0.0, scenario.mtbf_s
    if scenario.save_stall_s == 0:
        return 0.0
    for _ in range(100):
        middle = (low + high) / 2
        rising = -math.expm1(-(middle + scenario.save_stall_s) / m) > middle / m
        low, high = (middle, high) if rising else (low, middle)
    return low


def find_best_interval_steps(scenario: FailureScenario) -> int:
    """Return the best interval in steps, at least one write and at most the run."""
    minimum = max(1, math.ceil(scenario.save_write_s / scenario.step_s))
    below = math.floor(find_best_interval(scenario) / scenario.step_s)
    candidates = {min(max(steps, minimum), scenario.steps) for steps in (below, below + 1)}
    return max(candidates, key=lambda steps: compute_goodput(scenario, steps * scenario.step_s))


def simulate_failures(
    scenario: FailureScenario, num_trials: int, seed: int
) -> TimeBreakdown[NDArray[np.float64]]:
    """Return the time of each of `num_trials` simulated runs, by part.

    Times between failures are exponential at n times the rate of one node. Detection, restart and
    load take the scenario's times; responses are log-normal.
    """
    rng = np.random.default_rng(seed)
    times = TimeBreakdown(
        **{name: np.zeros(num_trials) for name in TimeBreakdown.__dataclass_fields__}
    )
    times.training[:] = scenario.num_intervals * scenario.interval_s
    write, cycle = scenario.save_write_s, scenario.interval_s + scenario.save_stall_s
    times.saving[:] = scenario.num_intervals * scenario.save_stall_s + write
    remaining = np.full(num_trials, float(scenario.num_intervals))
    running = np.arange(num_trials)
    while running.size:
        until_failure = rng.exponential(scenario.mtbf_s, running.size)
        fails = until_failure < remaining[running] * cycle + write
        running, until_failure = running[fails], until_failure[fails]
        durable = np.maximum(0, np.floor((until_failure - write) / cycle))
        durable = np.minimum(durable, remaining[running] - 1)  # rounding errors at the end
        remaining[running] -= durable
        times.lost[running] += until_failure - durable * cycle
        _simulate_recovery(scenario, times, running, rng)
    return times


def _simulate_recovery(
    scenario: FailureScenario,
    times: TimeBreakdown[NDArray[np.float64]],
    failed: NDArray[np.intp],
    rng: np.random.Generator,
) -> None:
    """Add the recovery of the failed runs to their times."""
    mean = -(RESPONSE_SIGMA**2) / 2
    while failed.size:
        times.failures[failed] += 1
        times.detecting[failed] += scenario.detect_s
        responses = rng.lognormal(mean, RESPONSE_SIGMA, failed.size)
        times.responding[failed] += scenario.response_s * responses
        until_failure = rng.exponential(scenario.mtbf_s, failed.size)
        times.restarting[failed] += np.minimum(until_failure, scenario.reload_s)
        failed = failed[until_failure < scenario.reload_s]


def compute_pooled_fraction(
    part: NDArray[np.float64], wall: NDArray[np.float64]
) -> tuple[float, float]:
    """Return the fraction of a part in the time of all trials, and its standard error."""
    fraction = float(part.sum() / wall.sum())
    residuals = part - fraction * wall
    return fraction, float(np.sqrt((residuals**2).mean() / len(wall)) / wall.mean())


def average_trials(times: TimeBreakdown[NDArray[np.float64]]) -> TimeBreakdown[float]:
    """Return the mean of the trials."""
    return TimeBreakdown(**{name: float(values.mean()) for name, values in asdict(times).items()})


def _find_save_problems(scenario: FailureScenario) -> list[str]:
    problems = []
    every, write = scenario.every_steps, scenario.save_write_s
    if every > scenario.steps:
        problems.append(
            f"every_steps={every} is more than steps={scenario.steps}, so no checkpoint would "
            f"be saved; use every_steps={scenario.steps} or less"
        )
    if write > scenario.interval_s:
        minimum = math.ceil(write / scenario.step_s)
        problems.append(
            f"save_write_s={write:g} is longer than the {scenario.interval_s:g} s from a save to "
            f"the next; use every_steps={minimum} or more"
        )
    return problems


def _find_endless_run_problems(scenario: FailureScenario, num_trials: int) -> list[str]:
    cycle = scenario.interval_s + scenario.save_stall_s
    cycle += scenario.save_write_s + scenario.reload_s
    if cycle > _MAX_CYCLE_IN_MTBFS * scenario.mtbf_s:
        return [
            f"the run would not end: from a restart to the next checkpoint is {cycle:,.0f} s, "
            f"and nodes={scenario.nodes} of mtbf_h={scenario.mtbf_h:g} fail every "
            f"{scenario.mtbf_s:,.3g} s; use a smaller every_steps or fewer nodes"
        ]
    failures = compute_expected_times(scenario).failures
    if failures > _MAX_FAILURES_PER_TRIAL or max(failures, 1) * num_trials > _MAX_FAILURES:
        return [
            f"trials={num_trials} of steps={scenario.steps} would simulate {failures:,.0f} "
            "failures each; use fewer trials, a smaller every_steps or fewer steps"
        ]
    return []
