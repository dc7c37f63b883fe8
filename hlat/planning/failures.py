"""What failures cost a run: uptime, goodput, and the best interval between checkpoints.

    working -> failure -> detection -> response -> restart and load -> lost steps replayed

Nodes fail independently at a constant rate, so the system fails at the sum of their rates. Any
response, of a person or of the machine that swaps the node, is then told by its mean as far as
expectations go, which gives exact formulas. The simulation shows what they hide: how far one run
strays from them, for a run sees few failures.

Sources: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9),
1974; J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
Future Generation Computer Systems 22(3), 2006.
"""

import math
from dataclasses import asdict, dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from hlat.config.errors import ConfigError

Number = TypeVar("Number", float, NDArray[np.float64])

RESPONSE_SIGMA = 1.0
"""Assumed: standard deviation of the logarithm of a response, which is log-normal."""

_LONGEST_STRETCH = 20
_MOST_FAILURES_PER_TRIAL = 1e5
_MOST_FAILURES = 1e7


@dataclass(frozen=True)
class Scenario:
    """A run and the ways in which it is interrupted; times in seconds unless they say hours.

    Attributes:
        nodes: Nodes that must all work.
        mtbf_h: Mean time between failures of one node, in hours.
        detect_s: From a failure until it is noticed.
        response_s: From there until the restart begins, on average: a person comes, or a node is
            replaced.
        restart_s: Until processes have started again; a failure meanwhile counts as another.
        load_s: Until they have read the checkpoint; the same holds.
        save_stall_s: For which a save stops training.
        save_write_s: From there until the checkpoint would survive a failure.
        step_s: A step of training.
        every_steps: Steps between two saves.
        steps: Steps of the run, rounded up to whole intervals.
    """

    nodes: int
    mtbf_h: float
    detect_s: float
    response_s: float
    restart_s: float
    load_s: float
    save_stall_s: float
    save_write_s: float
    step_s: float
    every_steps: int
    steps: int

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures of the whole system."""
        return self.mtbf_h * 3600 / self.nodes

    @property
    def interval_s(self) -> float:
        """Training between two saves."""
        return self.every_steps * self.step_s

    @property
    def reload_s(self) -> float:
        """The part of a recovery in which nodes work, and fail."""
        return self.restart_s + self.load_s

    @property
    def idle_s(self) -> float:
        """The part of a recovery before it, on average; another failure is mended along with it."""
        return self.detect_s + self.response_s

    @property
    def num_intervals(self) -> int:
        """Checkpoints of the run, the last of which ends it."""
        return -(-self.steps // self.every_steps)


@dataclass(frozen=True)
class Ledger(Generic[Number]):
    """Where the time goes, in seconds that add up to the wall time; of one run, or one per trial.

    Attributes:
        training: Steps that survive.
        saving: Stalls of the saves that survive, and the wait for the last to be written.
        lost: Steps and stalls that a failure undoes.
        detecting: Until a failure is noticed.
        responding: Until the restart begins.
        restarting: Starting and loading, failed attempts included.
        failures: Their number.
    """

    training: Number
    saving: Number
    lost: Number
    detecting: Number
    responding: Number
    restarting: Number
    failures: Number

    @property
    def wall(self) -> Number:
        """The sum of all parts."""
        return self.training + self.saving + self.lost + self.down

    @property
    def down(self) -> Number:
        """From each failure until the loaded checkpoint trains again."""
        return self.detecting + self.responding + self.restarting

    @property
    def up(self) -> Number:
        """The rest, lost steps included; its share is the uptime."""
        return self.training + self.saving + self.lost


def refuse_impossible(scenario: Scenario, trials: int) -> None:
    """Return if the formulas hold for the scenario and its simulation ends.

    Raises:
        ConfigError: Every reason why not.
    """
    if problems := [*_saves(scenario), *_endless(scenario, trials)]:
        raise ConfigError(*problems)


def goodput(scenario: Scenario, interval_s: float) -> float:
    """Return the share of a long run's time in steps that survive, at another interval; exact.

    Daly's equation for the expected wall time, with two terms beside his: the idle time D of each
    failure, in which nothing more can break, and the write time w, which acts as a longer restart.

        G = tau / ((M + D) exp((R + w) / M) (exp((tau + s) / M) - 1))
    """
    m = scenario.mtbf_s
    again = math.exp((scenario.reload_s + scenario.save_write_s) / m)
    failing = math.expm1((interval_s + scenario.save_stall_s) / m)
    return interval_s / ((m + scenario.idle_s) * again * failing)


def first_order(scenario: Scenario, interval_s: float) -> float:
    """Return 1 - s/tau - (tau/2 + w + D + R)/M, for when failures are rare."""
    per_failure = scenario.save_write_s + scenario.idle_s + scenario.reload_s
    lost = (interval_s / 2 + per_failure) / scenario.mtbf_s
    return 1 - scenario.save_stall_s / interval_s - lost


def expect(scenario: Scenario) -> Ledger[float]:
    """Return the exact expectation of the ledger of the scenario's run.

    What must pass without a failure takes V = M (exp(x / M) - 1) of working time, and the failures
    are V / M (Wald). From a start to its first durable checkpoint x = tau + s + w, from one durable
    checkpoint to the next tau + s; after each failure R + tau + s + w.
    """
    m, n = scenario.mtbf_s, scenario.num_intervals
    write, cycle = scenario.save_write_s, scenario.interval_s + scenario.save_stall_s
    first = math.expm1((cycle + write) / m)
    later = math.expm1(cycle / m) * math.exp(write / m)
    working = m * math.exp(scenario.reload_s / m) * (first + (n - 1) * later)
    failures = working / m
    restarting = -working * math.expm1(-scenario.reload_s / m)
    return Ledger(
        training=n * scenario.interval_s,
        saving=n * scenario.save_stall_s + write,
        lost=working - restarting - n * cycle - write,
        detecting=failures * scenario.detect_s,
        responding=failures * scenario.response_s,
        restarting=restarting,
        failures=failures,
    )


def young_interval(scenario: Scenario) -> float:
    """Return Young's optimum interval, sqrt(2 s M), in seconds."""
    return math.sqrt(2 * scenario.save_stall_s * scenario.mtbf_s)


def daly_interval(scenario: Scenario) -> float:
    """Return Daly's optimum interval of higher order, in seconds."""
    stall, m = scenario.save_stall_s, scenario.mtbf_s
    if stall >= 2 * m:
        return m
    root = math.sqrt(stall / (2 * m))
    return young_interval(scenario) * (1 + root / 3 + root**2 / 9) - stall


def best_interval(scenario: Scenario) -> float:
    """Return the interval, in seconds, that `goodput` is highest at; 0 if saves stop nothing.

    Its derivative is zero where 1 - tau/M = exp(-(tau + s) / M); D, R and w do not matter.
    """
    m, low, high = scenario.mtbf_s, 0.0, scenario.mtbf_s
    if scenario.save_stall_s == 0:
        return 0.0
    for _ in range(100):
        middle = (low + high) / 2
        rising = -math.expm1(-(middle + scenario.save_stall_s) / m) > middle / m
        low, high = (middle, high) if rising else (low, middle)
    return low


def best_steps(scenario: Scenario) -> int:
    """Return the best interval in whole steps: a save can be written in it, and the run has it."""
    least = max(1, math.ceil(scenario.save_write_s / scenario.step_s))
    below = math.floor(best_interval(scenario) / scenario.step_s)
    near = {min(max(steps, least), scenario.steps) for steps in (below, below + 1)}
    return max(near, key=lambda steps: goodput(scenario, steps * scenario.step_s))


def simulate(scenario: Scenario, trials: int, seed: int) -> Ledger[NDArray[np.float64]]:
    """Return the ledgers of `trials` runs, drawn from failure to failure.

    The next failure of the system is that of n independent nodes: exponential, at n times the rate
    of one. Detection, restart and load take what the scenario says, responses are log-normal.
    """
    rng = np.random.default_rng(seed)
    ledger = Ledger(**{name: np.zeros(trials) for name in Ledger.__dataclass_fields__})
    ledger.training[:] = scenario.num_intervals * scenario.interval_s
    write, cycle = scenario.save_write_s, scenario.interval_s + scenario.save_stall_s
    ledger.saving[:] = scenario.num_intervals * scenario.save_stall_s + write
    left = np.full(trials, float(scenario.num_intervals))
    running = np.arange(trials)
    while running.size:
        until_failure = rng.exponential(scenario.mtbf_s, running.size)
        fails = until_failure < left[running] * cycle + write
        running, until_failure = running[fails], until_failure[fails]
        durable = np.maximum(0, np.floor((until_failure - write) / cycle))
        durable = np.minimum(durable, left[running] - 1)  # against rounding at the very end
        left[running] -= durable
        ledger.lost[running] += until_failure - durable * cycle
        _recover(scenario, ledger, running, rng)
    return ledger


def _recover(
    scenario: Scenario,
    ledger: Ledger[NDArray[np.float64]],
    failed: NDArray[np.intp],
    rng: np.random.Generator,
) -> None:
    """Book what it takes the failed runs until they train again."""
    mean = -(RESPONSE_SIGMA**2) / 2
    while failed.size:
        ledger.failures[failed] += 1
        ledger.detecting[failed] += scenario.detect_s
        responses = rng.lognormal(mean, RESPONSE_SIGMA, failed.size)
        ledger.responding[failed] += scenario.response_s * responses
        until_failure = rng.exponential(scenario.mtbf_s, failed.size)
        ledger.restarting[failed] += np.minimum(until_failure, scenario.reload_s)
        failed = failed[until_failure < scenario.reload_s]


def pooled(part: NDArray[np.float64], wall: NDArray[np.float64]) -> tuple[float, float]:
    """Return the share of a part in the time of all trials, and its standard error."""
    share = float(part.sum() / wall.sum())
    residuals = part - share * wall
    return share, float(np.sqrt((residuals**2).mean() / len(wall)) / wall.mean())


def average(ledger: Ledger[NDArray[np.float64]]) -> Ledger[float]:
    """Return the mean of the trials."""
    return Ledger(**{name: float(values.mean()) for name, values in asdict(ledger).items()})


def _saves(scenario: Scenario) -> list[str]:
    problems = []
    every, write = scenario.every_steps, scenario.save_write_s
    if every > scenario.steps:
        problems.append(
            f"every_steps={every} is more than steps={scenario.steps}, so nothing would be saved; "
            f"use every_steps={scenario.steps} or less"
        )
    if write > scenario.interval_s:
        least = math.ceil(write / scenario.step_s)
        problems.append(
            f"save_write_s={write:g} is longer than the {scenario.interval_s:g} s from a save to "
            f"the next; use every_steps={least} or more"
        )
    return problems


def _endless(scenario: Scenario, trials: int) -> list[str]:
    stretch = scenario.interval_s + scenario.save_stall_s
    stretch += scenario.save_write_s + scenario.reload_s
    if stretch > _LONGEST_STRETCH * scenario.mtbf_s:
        return [
            f"the run would not end: from a restart to the next checkpoint is {stretch:,.0f} s, "
            f"and nodes={scenario.nodes} of mtbf_h={scenario.mtbf_h:g} fail every "
            f"{scenario.mtbf_s:,.3g} s; use a smaller every_steps or fewer nodes"
        ]
    failures = expect(scenario).failures
    if failures > _MOST_FAILURES_PER_TRIAL or max(failures, 1) * trials > _MOST_FAILURES:
        return [
            f"trials={trials} of steps={scenario.steps} would draw {failures:,.0f} failures each; "
            "use fewer trials, a smaller every_steps or fewer steps"
        ]
    return []
