"""Measure power and false positives of the verdicts over simulated studies.

Usage: python benchmarks/study/simulation.py [--studies 1000]   (writes simulation.json)

A study has a baseline and points with normal values. Runs of a seed share a part of their value, as
in training. The true difference is the one that the plan states as detectable. In some cases a run
diverges with a probability that depends on its point.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from hlat.config.study import StudyConfig
from hlat.study.paired_test import PointRuns
from hlat.study.power import compute_detectable_difference
from hlat.study.sequential_test import compute_sequential_detectable_difference
from hlat.study.study_analysis import Point, Verdict, analyze_study

HERE = Path(__file__).resolve().parent
SEED_STD, RUN_STD = 0.03, 0.01
"""Standard deviations of the common part of the runs of a seed, and of each run."""


@dataclass(frozen=True)
class Design:
    """Design of simulated studies.

    Attributes:
        num_seeds: Runs of each point.
        num_comparisons: Points without the baseline.
        stop_worse: Test after each seed.
        divergence: Probability that a run diverges.
        worse_divergence: The same, of the worse point. If it is larger, the finished runs of this
            point equal those of the baseline.
    """

    num_seeds: int
    num_comparisons: int
    stop_worse: bool
    divergence: float = 0.0
    worse_divergence: float = 0.0


@dataclass(frozen=True)
class Rates:
    """Rates over all simulated studies of a design."""

    difference: float
    stated_power: float
    power: float
    false_positives: float
    wrong_studies: float
    runs_saved: float


def simulate(design: Design, num_studies: int) -> Rates:
    """Return the rates over `num_studies` studies with, and as many without, a difference.

    With one, the first point is worse than the baseline, and the others equal it.
    """
    study = StudyConfig(stop_worse=design.stop_worse, baseline={"point": "0"})
    difference = compute_difference(design, study)
    num_points = design.num_comparisons + 1
    generator = np.random.default_rng(
        design.num_seeds
        + 100 * design.num_comparisons
        + 10_000 * design.stop_worse
        + round(1e6 * design.divergence)
        + round(1e8 * design.worse_divergence)
    )
    equal = np.full(num_points, design.divergence)
    worse = equal.copy()
    worse[1] = design.worse_divergence
    found, wrong, wrong_studies, saved = 0, 0, 0, 0
    for _ in range(num_studies):
        values = sample_values(generator, design.num_seeds, equal)
        verdicts, _ = run_study(values, study)
        wrong += sum(verdict is not Verdict.undecided for verdict in verdicts)
        wrong_studies += any(verdict is not Verdict.undecided for verdict in verdicts)
        values = sample_values(generator, design.num_seeds, worse)
        values[1] += difference
        verdicts, num_runs = run_study(values, study)
        found += verdicts[0] is Verdict.worse
        saved += values.size - num_runs
    return Rates(
        difference,
        study.power,
        found / num_studies,
        wrong / num_studies / design.num_comparisons,
        wrong_studies / num_studies,
        saved / num_studies / (num_points * design.num_seeds),
    )


def compute_difference(design: Design, study: StudyConfig) -> float:
    """Return the difference that the plan of a study without diverged runs states."""
    if design.worse_divergence > design.divergence:
        return 0.0
    std, alpha = RUN_STD * 2**0.5, study.alpha / design.num_comparisons
    detect = (
        compute_sequential_detectable_difference
        if design.stop_worse
        else compute_detectable_difference
    )
    return detect(std, design.num_seeds, alpha, study.power)


def sample_values(
    generator: np.random.Generator, num_seeds: int, divergence: np.ndarray
) -> np.ndarray:
    """Return values of the shape (points, seeds), NaN for diverged runs."""
    shape = (len(divergence), num_seeds)
    shared = generator.normal(2.0, SEED_STD, num_seeds)
    values = shared + generator.normal(0, RUN_STD, shape)
    if divergence.any():
        values[generator.random(shape) < divergence[:, None]] = np.nan
    return values


def run_study(values: np.ndarray, design: StudyConfig) -> tuple[list[Verdict], int]:
    """Return the verdicts of a study that trains seed by seed, and the number of its runs."""
    num_points, num_seeds = values.shape
    tested_seeds = range(2, num_seeds + 1) if design.stop_worse else [num_seeds]
    num_trained = [num_seeds] * num_points
    for count in tested_seeds:
        seeds = [min(count, trained) for trained in num_trained]
        points: dict[Point, PointRuns] = {
            (("point", str(i)),): build_runs(row[: seeds[i]]) for i, row in enumerate(values)
        }
        comparisons = analyze_study(points, design, num_seeds)
        for i, comparison in enumerate(comparisons, start=1):
            if comparison.verdict is Verdict.worse and design.stop_worse:
                num_trained[i] = min(num_trained[i], count)
    return [comparison.verdict for comparison in comparisons], sum(num_trained)


def build_runs(values: np.ndarray) -> PointRuns:
    """Return the runs of a point; NaN is a diverged run."""
    finished = {str(seed): value for seed, value in enumerate(values) if not np.isnan(value)}
    diverged = frozenset(str(seed) for seed in range(len(values)) if str(seed) not in finished)
    return PointRuns(finished, diverged)


def list_designs() -> list[Design]:
    """Return all designs: first without diverged runs."""
    return [
        Design(num_seeds, num_comparisons, stop_worse, *divergence)
        for counts, divergences in (((3, 5, 8), [()]), ((5, 8, 12), [(0.2, 0.2), (0.1, 0.9)]))
        for divergence in divergences
        for num_seeds in counts
        for num_comparisons in (1, 3)
        for stop_worse in (False, True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--studies", type=int, default=1000)
    num_studies = parser.parse_args().studies
    cases = []
    for design in list_designs():
        cases.append(asdict(design) | asdict(simulate(design, num_studies)))
        print(cases[-1], flush=True)
    result = {"studies": num_studies, "cases": cases}
    (HERE / "simulation.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
