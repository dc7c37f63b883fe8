"""Fit the planner's constants of GPUs to the fitted rows of throughput_rows.csv.

Usage: PYTHONPATH=. python benchmarks/planning/fit_devices.py

Minimizes the squared log error of the fitted rows, in which each source has the same weight per
device, plus the squared deviation of each constant from its prior. Leaves out one source at a time,
and one model of a source at a time, and writes device_fit.json. It does not read held-out rows.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import t

from benchmarks.planning.row_planner import Constants, compute_throughput, plan_row
from benchmarks.planning.throughput_rows import ThroughputRow, load_rows

OUTPUT = Path(__file__).with_name("device_fit.json")
Rows = Sequence[ThroughputRow]
ROW_ERROR = 0.05
"""Standard deviation of the log error of a row besides that of the constants."""


class Prior(NamedTuple):
    """Mean, standard deviation and maximum of a constant.

    The standard deviation is that of the logarithm, and of the value if `is_linear`.
    """

    mean: float
    std: float
    maximum: float = math.inf
    is_linear: bool = False


PRIORS = {
    "sustained": Prior(0.85, 0.10),
    "a100": Prior(1.0, 0.10),
    "h100_500w": Prior(0.87, 0.08),
    "float8": Prior(1.0, 0.08),
    "attention": Prior(1.0, 0.15),
    "compiled_passes": Prior(4.0, 0.3),
    "eager_passes": Prior(10.0, 0.4),
    "overlap": Prior(0.7, 0.2, 1.0, is_linear=True),
    "link": Prior(0.39, 0.3, 0.5),
    "network": Prior(0.8, 0.2, 1.0),
    "tensor_overlap": Prior(0.7, 0.2, 1.0, is_linear=True),
    "NeMo": Prior(1.0, 0.15),
    "llm-foundry": Prior(1.0, 0.15),
    "KempnerForge": Prior(1.0, 0.15),
}


def build_constants(values: np.ndarray) -> Constants:
    """Return the constants for a vector in the order of PRIORS."""
    named = {}
    for (name, prior), value in zip(PRIORS.items(), values, strict=True):
        named[name] = value if prior.is_linear else prior.mean * math.exp(value)
    known = {field.name for field in fields(Constants)}
    factors = {name: value for name, value in named.items() if name not in known}
    return Constants(**{k: v for k, v in named.items() if k in known}, factors=factors)


def weigh_rows(rows: Rows) -> np.ndarray:
    """Return weights with mean 1, the same sum for each source and device."""
    groups = [(row.source, row.device) for row in rows]
    counts = Counter(groups)
    return np.array([len(rows) / (len(counts) * counts[group]) for group in groups])


def compute_log_error(row: ThroughputRow, constants: Constants) -> float:
    """Return log(planned / published) of the throughput."""
    planned = compute_throughput(row, plan_row(row, constants).total)
    return math.log(planned / row.published)


def fit(rows: Rows, start: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the constants as a vector, and their standard deviations.

    The search begins with `start`, by default the means of the priors.
    """
    weights = np.sqrt(weigh_rows(rows)) / ROW_ERROR
    means = np.array([prior.mean if prior.is_linear else 0.0 for prior in PRIORS.values()])
    stds = np.array([prior.std for prior in PRIORS.values()])
    upper = [
        prior.maximum if prior.is_linear else math.log(prior.maximum / prior.mean)
        for prior in PRIORS.values()
    ]
    lower = [0.0 if prior.is_linear else -np.inf for prior in PRIORS.values()]

    def residuals(values: np.ndarray) -> np.ndarray:
        constants = build_constants(values)
        errors = np.array([compute_log_error(row, constants) for row in rows])
        return np.concatenate([errors * weights, (values - means) / stds])

    found = least_squares(
        residuals,
        means if start is None else start,
        bounds=(lower, upper),
        diff_step=1e-3,
        xtol=1e-4,
    )
    covariance = np.linalg.inv(found.jac.T @ found.jac)
    return found.x, np.sqrt(np.diag(covariance))


def leave_out(
    rows: Rows, get_group: Callable[[ThroughputRow], str], start: np.ndarray
) -> dict[str, float]:
    """Return the log error of each row with constants that are fitted to the other groups."""
    errors = {}
    for group in dict.fromkeys(map(get_group, rows)):
        constants = build_constants(fit([row for row in rows if get_group(row) != group], start)[0])
        for row in rows:
            if get_group(row) == group:
                errors[row.row_id] = compute_log_error(row, constants)
    return errors


def compute_interval(rows: Rows, errors: Mapping[str, float], num_groups: int) -> float:
    """Return the logarithm of the upper end of the 80% interval of a step time.

    It is that of Student's t distribution around 0 with the weighted mean square of the errors,
    and a degree of freedom for each group that was left out.
    """
    squares = np.array([errors[row.row_id] ** 2 for row in rows])
    variance = float(np.average(squares, weights=weigh_rows(rows)))
    return float(t.ppf(0.9, num_groups)) * math.sqrt(variance)


def get_model_group(row: ThroughputRow) -> str:
    """Return the group of rows of a model in one source, on one device and in one precision."""
    return f"{row.source}, {row.model}, {row.device}, {row.precision}"


def group_by(
    rows: Rows, get_key: Callable[[ThroughputRow], str | None]
) -> dict[str, list[ThroughputRow]]:
    """Return the rows by key."""
    groups: dict[str, list[ThroughputRow]] = {}
    for row in rows:
        groups.setdefault(get_key(row) or "", []).append(row)
    return groups


def summarize(rows: Rows, errors: Mapping[str, float]) -> dict[str, float]:
    """Return median and root mean square of absolute log errors, weighted by source."""
    weights = weigh_rows(rows)
    sizes = np.array([abs(errors[row.row_id]) for row in rows])
    order = np.argsort(sizes)
    reached = np.cumsum(weights[order]) / weights.sum()
    return {
        "median": round(float(sizes[order][np.searchsorted(reached, 0.5)]), 4),
        "rms": round(float(np.sqrt(np.average(sizes**2, weights=weights))), 4),
        "largest": round(float(sizes.max()), 4),
    }


def main() -> None:
    rows = [row for row in load_rows() if row.is_fitted and row.framework != "NxD"]
    values, stds = fit(rows)
    constants = build_constants(values)
    errors = {
        "fitted": {row.row_id: compute_log_error(row, constants) for row in rows},
        "model left out": leave_out(rows, get_model_group, values),
        "source left out": leave_out(rows, lambda row: row.source, values),
        "framework left out": leave_out(rows, lambda row: row.framework, values),
    }
    by_device = group_by(rows, lambda row: row.config.hardware.device)
    intervals = {
        device: {
            "known framework": compute_interval(
                group, errors["model left out"], len({*map(get_model_group, group)})
            ),
            "other framework": compute_interval(
                group, errors["framework left out"], len({row.framework for row in rows})
            ),
        }
        for device, group in by_device.items()
    }
    result = {
        "constants": asdict(constants),
        "standard_deviations": dict(zip(PRIORS, stds.tolist(), strict=True)),
        "errors": errors,
        "summary": {name: summarize(rows, found) for name, found in errors.items()},
        "intervals": intervals,
        "rows": {
            device: dict(Counter(row.framework for row in group))
            for device, group in by_device.items()
        },
    }
    OUTPUT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "errors"}, indent=1))
    for row in rows:
        print(
            row.row_id,
            row.device,
            row.framework,
            row.model,
            row.layout,
            row.precision,
            *(f"{name} {found[row.row_id]:+.3f}" for name, found in errors.items()),
        )


if __name__ == "__main__":
    main()
