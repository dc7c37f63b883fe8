"""Simulate the recorded studies with their designs and spreads: wrong verdicts, found differences.

Usage: PYTHONPATH=. python benchmarks/study/recorded_studies.py [--studies 1000]
       (reads benchmarks/sweeps/*.json; writes recorded_studies.json and a table in README.md)

A simulated study has the points and seeds of the recorded one. Each point has the mean of its
baseline, an error of the seed and an error of the run, with the recorded standard deviations at its
learning rate. In half of the studies no point differs, so that better or worse is wrong. In the
others, the first compared point is worse by the difference that the plan states as detectable for
this spread; with a grid of learning rates, at all rates, or in the mean over them.
"""

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.common import table, write_between
from hlat.config.compose import compose_config
from hlat.config.config_errors import ConfigError
from hlat.config.lr_grid import LR_KEY
from hlat.config.resolve import resolve_config
from hlat.config.study import StudyConfig
from hlat.study.paired_test import PointRuns
from hlat.study.power import compute_detectable_difference
from hlat.study.rate_comparison import CRITERIA, analyze_rate_criteria, compares_over_rates
from hlat.study.study_analysis import Comparison, Point, Verdict, analyze_study, find_baselines
from hlat.tracking.text_format import format_setting

HERE = Path(__file__).resolve().parent
RECORDS = HERE.parent / "sweeps"


@dataclass(frozen=True)
class RateErrors:
    """Standard deviations at a learning rate: of the seeds, and of the runs without their seed."""

    seed_std: float
    run_std: float


@dataclass(frozen=True)
class RecordedStudy:
    """Design, means of the baseline by point, and errors by learning rate ("" without a grid)."""

    design: StudyConfig
    means: dict[Point, float]
    errors: dict[str, RateErrors]
    num_seeds: int
    initial: float


@dataclass(frozen=True)
class StudyRates:
    """Rates over simulated studies by criterion, in the order of `criteria`.

    `differences` are the simulated ones, with which `found` is the rate of the verdict worse.
    """

    num_runs: int
    num_seeds: int
    num_comparisons: int
    wrong_studies: float
    criteria: list[str]
    differences: list[float]
    found: list[float]


def load_study(path: Path) -> RecordedStudy | None:
    """Return a recorded study; None if it has no baseline, or runs are missing."""
    record = json.loads(path.read_text())
    rows = record.get("points")
    try:
        design = resolve_config(compose_config([f"+sweep={path.stem}"])).study
    except ConfigError:
        return None
    if not isinstance(rows, list):
        return None
    values = {tuple(row["point"].items()): row["values"] for row in rows}
    seeds = {seed for each in values.values() for seed in each}
    if any(each.keys() != seeds for each in values.values()) or len(seeds) < 2:
        return None
    factors = {key for point in values for key, _ in point}
    baseline = {
        key if key in factors else f"{key}.name": format_setting(value)
        for key, value in design.baseline.items()
    }
    if not baseline or not baseline.keys() <= factors:
        return None
    groups: dict[str, list[Point]] = {}
    for point in values:
        groups.setdefault(dict(point).get(LR_KEY, ""), []).append(point)
    pairs = dict(find_baselines([*values], baseline))
    matrix = {
        point: np.array([each[seed] for seed in sorted(seeds)]) for point, each in values.items()
    }
    initial = [value for row in rows for value in row.get("initial_values", {}).values()]
    return RecordedStudy(
        replace(design, baseline=baseline),
        {point: float(matrix[pairs.get(point, point)].mean()) for point in values},
        {rate: estimate_errors([matrix[one] for one in points]) for rate, points in groups.items()},
        len(seeds),
        float(np.mean(initial)) if initial else float("nan"),
    )


def estimate_errors(rows: list[np.ndarray]) -> RateErrors:
    """Return the standard deviations of an additive model of points and seeds."""
    values = np.array(rows)
    num_points, num_seeds = values.shape
    residuals = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
    variance = (residuals**2).sum() / ((num_points - 1) * (num_seeds - 1))
    of_seeds = values.mean(0).var(ddof=1) - variance / num_points
    return RateErrors(float(np.sqrt(max(of_seeds, 0.0))), float(np.sqrt(variance)))


def sample(
    study: RecordedStudy, generator: np.random.Generator, shifts: dict[Point, float]
) -> list[Comparison]:
    """Return the comparisons of a simulated study, of all criteria one after the other."""
    seeds = [str(seed) for seed in range(study.num_seeds)]
    offsets = {
        rate: generator.normal(0, one.seed_std, study.num_seeds)
        for rate, one in study.errors.items()
    }
    points = {}
    for point, mean in study.means.items():
        rate = dict(point).get(LR_KEY, "")
        errors = offsets[rate] + generator.normal(0, study.errors[rate].run_std, study.num_seeds)
        values = mean + shifts.get(point, 0.0) + errors
        points[point] = PointRuns(dict(zip(seeds, map(float, values), strict=True)))
    if not compares_over_rates(study.design):
        return analyze_study(points, study.design)
    initial = {point: dict.fromkeys(seeds, study.initial) for point in points}
    criteria = analyze_rate_criteria(points, initial, study.design)
    return [comparison for one in criteria for comparison in one.comparisons]


def simulate(study: RecordedStudy, num_studies: int) -> StudyRates:
    """Return the rates over `num_studies` studies without, and with, each difference."""
    generator = np.random.default_rng(study.num_seeds)
    has_grid = compares_over_rates(study.design)
    criteria = CRITERIA if has_grid else (study.design.metric,)
    null = [sample(study, generator, {}) for _ in range(num_studies)]
    wrong = [any(is_decided(one) for one in comparisons) for comparisons in null]
    per_criterion = len(null[0]) // len(criteria)
    differences, found = [], []
    for index in range(len(criteria)):
        first = index * per_criterion
        variances = [comparisons[first].difference.std ** 2 for comparisons in null]
        difference = compute_detectable_difference(
            float(np.sqrt(np.mean(variances))),
            study.num_seeds,
            study.design.alpha / len(null[0]),
            study.design.power,
        )
        shifts = build_shifts(study, null[0][first].point, difference, index)
        results = [sample(study, generator, shifts)[first] for _ in range(num_studies)]
        differences.append(difference)
        found.append(float(np.mean([one.verdict is Verdict.worse for one in results])))
    return StudyRates(
        len(study.means) * study.num_seeds,
        study.num_seeds,
        len(null[0]),
        float(np.mean(wrong)),
        [*criteria],
        differences,
        found,
    )


def build_shifts(
    study: RecordedStudy, compared: Point, difference: float, criterion: int
) -> dict[Point, float]:
    """Return the shift of each point that makes `compared` worse by a difference of a criterion."""
    members = [point for point in study.means if {*compared} <= {*point}]
    if criterion == 0:
        return dict.fromkeys(members, difference)
    worst = max(members, key=study.means.__getitem__)
    return {worst: difference * len(members)}


def is_decided(comparison: Comparison) -> bool:
    """Return True for a verdict that is wrong if no point differs."""
    return comparison.verdict in (Verdict.better, Verdict.worse)


def build_rows(rates: dict[str, StudyRates]) -> list[list[str]]:
    """Return a row for each study and criterion."""
    return [
        [
            name,
            str(one.num_runs),
            str(one.num_seeds),
            str(one.num_comparisons),
            f"{one.wrong_studies:.1%}",
            criterion,
            f"{difference:.3g}",
            f"{found:.1%}",
        ]
        for name, one in rates.items()
        for criterion, difference, found in zip(
            one.criteria, one.differences, one.found, strict=True
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--studies", type=int, default=1000)
    num_studies = parser.parse_args().studies
    rates: dict[str, StudyRates] = {}
    for path in sorted(RECORDS.glob("*.json")):
        study = load_study(path)
        if study is not None:
            rates[path.stem] = simulate(study, num_studies)
            print(path.stem, asdict(rates[path.stem]), flush=True)
    content = {"studies": num_studies} | {name: asdict(one) for name, one in rates.items()}
    (HERE / "recorded_studies.json").write_text(json.dumps(content, indent=1) + "\n")
    headers = [
        *("study", "runs", "seeds", "comparisons", "wrong verdicts per study", "criterion"),
        *("detectable difference", "found"),
    ]
    write_between(HERE / "README.md", "recorded", table(headers, build_rows(rates)))


if __name__ == "__main__":
    main()
