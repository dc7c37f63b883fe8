"""Constants of a cluster from step times of its runs, and the runs that determine them best.

The constants are those of the device, or assumed ones, times a factor for each group of
`CONSTANTS`. The logarithms of the factors have a normal prior. They have the highest posterior
density for normal log errors of step times, as those of devices
(benchmarks/planning/fit_devices.py).

The suggested runs reduce the mean variance of the predicted step times most, one after the other
(V-optimality; Atkinson, Donev and Tobias, Optimum Experimental Designs, 2007, chapter 10).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import t

from hlat.config.batch_steps import list_batch_shapes
from hlat.config.config_errors import ConfigError
from hlat.config.run import Config
from hlat.config.run_steps import compute_total_steps
from hlat.plan.achieved_speed import compute_achieved_speed
from hlat.plan.calibration_file import CONSTANTS, get_device_efficiency
from hlat.plan.hardware_efficiency import HardwareEfficiency
from hlat.plan.layout_costs import LayoutCosts
from hlat.plan.layout_search import LayoutCandidate, search_layouts
from hlat.plan.step_time import compute_step_time
from hlat.study.power_law import Array
from hlat.study.run_record import is_run_dir, load_run_record

STEP_ERROR = 0.05
"""Standard deviation of the log error of a step time besides that of the constants."""
PRIOR_STDS = {
    "matmuls": 0.1,
    "other operators": 0.3,
    "start of operators": 0.3,
    "links": 0.3,
    "network": 0.3,
    "start of collectives": 0.3,
}
"""Standard deviations of the log factors of devices with constants, as for the fitted rows."""
ASSUMED_STEP_ERROR = 0.1
ASSUMED_STD = 0.3
COMMON_STD = 1.5
"""The same for assumed constants: of a step time, of each log factor, and of a common factor of all
speeds, whose 80% interval is a factor of 7."""
_TIMES = ("other operators", "start of operators", "start of collectives")
"""Groups of constants that are times, not speeds."""
_NUM_WARMUP_STEPS = 3
_MIN_STEPS = 5
_MAX_LAYOUTS = 2000
"""Layouts above which a part of them is compared, evenly over their step times."""
_MAX_SLOWDOWN = 3.0
"""Step time relative to the fastest layout above which a layout is not considered."""
_DIFFERENCE = 1e-3


@dataclass(frozen=True)
class MeasuredRun:
    """Configuration of a run, and the median seconds of its steps."""

    name: str
    config: Config
    step_s: float


@dataclass(frozen=True)
class Calibration:
    """Constants fitted to runs.

    Attributes:
        runs: Measured runs.
        base: Constants of the device, or assumed ones.
        efficiency: Fitted constants.
        factors: Ratio of fitted and former constants by group.
        planned_s: Predicted seconds of the steps of each run, with former and fitted constants, and
            with those fitted to the other runs.
    """

    runs: tuple[MeasuredRun, ...]
    base: HardwareEfficiency
    efficiency: HardwareEfficiency
    factors: dict[str, float]
    planned_s: tuple[tuple[float, float, float], ...]


@dataclass(frozen=True)
class SuggestedRun:
    """Layout to train, and the standard deviation of log step times once it is measured too."""

    layout: Config
    overrides: tuple[str, ...]
    std: float


def load_measured_run(directory: Path) -> MeasuredRun:
    """Return the step time of a run.

    Raises:
        ConfigError: It is no run, has too few steps, or its batch grows.
    """
    if not is_run_dir(directory):
        raise ConfigError(f"{directory} is not the directory of a run; train one with hlat train")
    record = load_run_record(directory)
    config = record.valid_config
    if len(list_batch_shapes(compute_total_steps(config), config.batch)) > 1:
        raise ConfigError(
            f"{directory} has a batch that grows, so its steps differ; set batch.ramp=null"
        )
    seconds = record.get_column("step_seconds")[_NUM_WARMUP_STEPS:]
    seconds = seconds[seconds > 0]
    if len(seconds) < _MIN_STEPS:
        raise ConfigError(
            f"{directory} has {len(seconds)} logged steps after the first {_NUM_WARMUP_STEPS}, "
            f"fewer than {_MIN_STEPS}; train it longer, or set run.log_every=1"
        )
    return MeasuredRun(directory.name, config, float(np.median(seconds)))


def calibrate(runs: Sequence[MeasuredRun]) -> Calibration:
    """Return the constants of the hardware of runs.

    Raises:
        ConfigError: The runs have different hardware or compute dtypes.
    """
    _validate_runs(runs)
    base, names = get_device_efficiency(runs[0].config), _list_groups(runs[0].config)
    values = _fit(base, names, runs)
    fitted = _scale(base, names, values)
    planned = []
    for i, run in enumerate(runs):
        others = [*runs[:i], *runs[i + 1 :]]
        without = _scale(base, names, _fit(base, names, others))
        before, after, other = (predict_step(run.config, one) for one in (base, fitted, without))
        planned.append((before, after, other))
    errors = [math.log(row[2] / run.step_s) for row, run in zip(planned, runs, strict=True)]
    variance = max(_get_step_error(base) ** 2, float(np.mean(np.square(errors))))
    bound = math.exp(float(t.ppf(0.9, len(runs))) * math.sqrt(variance))
    now = datetime.now(timezone.utc)
    source = f"{len(runs)} measured runs, calibrated on {now:%Y-%m-%d}"
    interval = (1 / bound, bound)
    efficiency = replace(
        fitted, source=source, interval=interval, layout_interval=interval, is_calibrated=True
    )
    factors = {name: math.exp(value) for name, value in zip(names, values, strict=True)}
    return Calibration(tuple(runs), base, efficiency, factors, tuple(planned))


def predict_step(config: Config, efficiency: HardwareEfficiency) -> float:
    """Return the seconds of a step with given constants."""
    return compute_step_time(config, compute_achieved_speed(config, efficiency)).total


def suggest_runs(config: Config, count: int) -> tuple[list[SuggestedRun], float]:
    """Return the layouts of a run whose step times determine those of all layouts best.

    They have different tensor-, pipeline- and expert-parallel degrees where possible, because the
    errors of layouts with equal degrees are similar. The second value is the standard deviation of
    log step times without them.

    Raises:
        ConfigError: No layout fits.
    """
    base, names = get_device_efficiency(config), _list_groups(config)
    layouts = _list_candidates(config, base)
    slopes = _compute_slopes([one.config for one in layouts], base, names)
    covariance, variance = compute_prior(base, names), _get_step_error(base) ** 2
    start, suggested = _compute_std(slopes, covariance), list[SuggestedRun]()
    degrees, chosen = [_get_degrees(one.config) for one in layouts], list[int]()
    for _ in range(min(count, len(layouts))):
        products = slopes @ covariance @ slopes.T
        gains = np.mean(products**2, axis=0) / (variance + np.diag(products))
        measured = {degrees[i] for i in chosen}
        others = [i for i, one in enumerate(degrees) if one not in measured]
        others = others or [i for i in range(len(layouts)) if i not in chosen]
        best = max(others, key=gains.__getitem__)
        chosen.append(best)
        step = covariance @ slopes[best]
        covariance -= np.outer(step, step) / (variance + products[best, best])
        std = _compute_std(slopes, covariance)
        suggested.append(SuggestedRun(layouts[best].config, tuple(layouts[best].overrides), std))
    return suggested, start


def _list_candidates(config: Config, base: HardwareEfficiency) -> list[LayoutCandidate]:
    """Return the layouts that fit and are not much slower than the fastest one."""
    layouts = [layout for layout in search_layouts(config) if layout.fits]
    if not layouts:
        raise ConfigError("no layout fits on these nodes; hlat plan has the memory that is missing")
    layouts = layouts[:: -(-len(layouts) // _MAX_LAYOUTS)]
    steps = _predict_all([one.config for one in layouts], base)
    limit = _MAX_SLOWDOWN * min(steps)
    return [one for one, step_s in zip(layouts, steps, strict=True) if step_s <= limit]


def _compute_slopes(
    layouts: Sequence[Config], base: HardwareEfficiency, names: Sequence[str]
) -> Array:
    """Return the derivatives of log step times in the log factors [layouts, constants]."""
    points = [np.zeros(len(names)), *(_DIFFERENCE * np.eye(len(names)))]
    logs = np.log([_predict_all(layouts, _scale(base, names, values)) for values in points])
    slopes: Array = (logs[1:] - logs[0]).T / _DIFFERENCE
    return slopes


def _get_degrees(config: Config) -> tuple[int, int, int]:
    layout = config.parallelism
    return layout.tp, layout.pp, layout.ep


def _validate_runs(runs: Sequence[MeasuredRun]) -> None:
    """Raise ConfigError if runs cannot have common constants."""
    first = runs[0]
    for run in runs[1:]:
        for key, get in _COMMON_SETTINGS.items():
            if get(run.config) != get(first.config):
                raise ConfigError(
                    f"{first.name} has {key}={get(first.config)} and {run.name} "
                    f"{get(run.config)}; calibrate runs of one kind of nodes at a time"
                )


_COMMON_SETTINGS: dict[str, Callable[[Config], object]] = {
    "hardware.name": lambda config: config.hardware.name,
    "hardware.device": lambda config: config.hardware.device,
    "precision.compute_dtype": lambda config: config.precision.compute_dtype.value,
}


def _list_groups(config: Config) -> list[str]:
    """Return the groups of constants that the hardware has."""
    base = get_device_efficiency(config)
    return [
        name for name, fields in CONSTANTS.items() if any(getattr(base, field) for field in fields)
    ]


def compute_prior(base: HardwareEfficiency, names: Sequence[str]) -> Array:
    """Return the covariance of the log factors of groups of constants."""
    if not base.assumes_peaks:
        return np.diag([PRIOR_STDS[name] ** 2 for name in names])
    signs = np.array([-1.0 if name in _TIMES else 1.0 for name in names])
    covariance: Array = ASSUMED_STD**2 * np.eye(len(names)) + COMMON_STD**2 * np.outer(signs, signs)
    return covariance


def _get_step_error(base: HardwareEfficiency) -> float:
    return ASSUMED_STEP_ERROR if base.assumes_peaks else STEP_ERROR


def _scale(base: HardwareEfficiency, names: Sequence[str], logs: Array) -> HardwareEfficiency:
    """Return the constants times a factor for each group."""
    return replace(
        base,
        **{
            field: value * math.exp(log)
            for name, log in zip(names, logs, strict=True)
            for field in CONSTANTS[name]
            if (value := getattr(base, field)) is not None
        },
    )


def _fit(base: HardwareEfficiency, names: Sequence[str], runs: Sequence[MeasuredRun]) -> Array:
    """Return the log factors of the groups."""
    if not runs:
        return np.zeros(len(names))
    whitening = np.linalg.cholesky(np.linalg.inv(compute_prior(base, names))).T
    step_error = _get_step_error(base)

    def compute_residuals(logs: Array) -> Array:
        scaled = _scale(base, names, logs)
        errors = [math.log(predict_step(run.config, scaled) / run.step_s) for run in runs]
        return np.concatenate([np.array(errors) / step_error, whitening @ logs])

    logs: Array = least_squares(compute_residuals, np.zeros(len(names)), diff_step=1e-4).x
    return logs


def _predict_all(layouts: Sequence[Config], efficiency: HardwareEfficiency) -> list[float]:
    """Return the seconds of a step of layouts of one run."""
    costs = LayoutCosts(compute_achieved_speed(layouts[0], efficiency))
    steps = [costs.compute_step_time(layout) for layout in layouts]
    return [step.total for step in steps if step is not None]


def _compute_std(slopes: Array, covariance: Array) -> float:
    """Return the root mean square of the standard deviations of log step times."""
    return math.sqrt(np.mean(np.einsum("ij,jk,ik->i", slopes, covariance, slopes)))
