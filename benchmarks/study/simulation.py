"""Measure power and false positives of the verdicts over simulated studies.

Usage: python benchmarks/study/simulation.py [--studies 1000]   (writes simulation.json)

A study has a baseline and points with normal values. Runs of a seed share a part of their value, as
in training. The true difference is the one that the plan states as detectable.
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
from hlat.study.study_analysis import Verdict, analyze_study

HERE = Path(__file__).resolve().parent
SEED_STD, RUN_STD = 0.03, 0.01
"""Standard deviations of what the runs of a seed share, and of each run."""


@dataclass(frozen=True)
class Case:
    """A design, and the rates that were found."""

    num_seeds: int
    num_comparisons: int
    stop_worse: bool
    difference: float
    stated_power: float
    power: float
    false_positives: float
    wrong_studies: float
    runs_saved: float


def simulate(num_seeds: int, num_comparisons: int, stop_worse: bool, num_studies: int) -> Case:
    """Return the rates over `num_studies` studies with, and as many without, a difference.

    With one, the first point is worse than the baseline, and the others equal it.
    """
    design = StudyConfig(stop_worse=stop_worse, baseline={"point": "0"})
    std, alpha = RUN_STD * 2**0.5, design.alpha / num_comparisons
    detect = (
        compute_sequential_detectable_difference if stop_worse else compute_detectable_difference
    )
    difference = detect(std, num_seeds, alpha, design.power)
    generator = np.random.default_rng(num_seeds + 100 * num_comparisons + 10_000 * stop_worse)
    found, wrong, wrong_studies, saved = 0, 0, 0, 0
    for _ in range(num_studies):
        values = sample_values(generator, num_comparisons + 1, num_seeds)
        verdicts, _ = run_study(values, design)
        wrong += sum(verdict is not Verdict.undecided for verdict in verdicts)
        wrong_studies += any(verdict is not Verdict.undecided for verdict in verdicts)
        values = sample_values(generator, num_comparisons + 1, num_seeds)
        values[1] += difference
        verdicts, num_runs = run_study(values, design)
        found += verdicts[0] is Verdict.worse
        saved += values.size - num_runs
    return Case(
        num_seeds,
        num_comparisons,
        stop_worse,
        difference,
        design.power,
        found / num_studies,
        wrong / num_studies / num_comparisons,
        wrong_studies / num_studies,
        saved / num_studies / ((num_comparisons + 1) * num_seeds),
    )


def sample_values(generator: np.random.Generator, num_points: int, num_seeds: int) -> np.ndarray:
    """Return values of the shape (points, seeds)."""
    shared = generator.normal(2.0, SEED_STD, num_seeds)
    return shared + generator.normal(0, RUN_STD, (num_points, num_seeds))


def run_study(values: np.ndarray, design: StudyConfig) -> tuple[list[Verdict], int]:
    """Return the verdicts of a study that trains seed by seed, and the number of its runs."""
    num_points, num_seeds = values.shape
    looks = range(2, num_seeds + 1) if design.stop_worse else [num_seeds]
    num_trained = [num_seeds] * num_points
    for look in looks:
        seeds = [min(look, trained) for trained in num_trained]
        points = {
            (("point", str(i)),): PointRuns({str(s): row[s] for s in range(seeds[i])})
            for i, row in enumerate(values)
        }
        comparisons = analyze_study(points, design, num_seeds)
        for i, comparison in enumerate(comparisons, start=1):
            if comparison.verdict is Verdict.worse and design.stop_worse:
                num_trained[i] = min(num_trained[i], look)
    return [comparison.verdict for comparison in comparisons], sum(num_trained)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--studies", type=int, default=1000)
    num_studies = parser.parse_args().studies
    cases = [
        simulate(num_seeds, num_comparisons, stop_worse, num_studies)
        for num_seeds in (3, 5, 8)
        for num_comparisons in (1, 3)
        for stop_worse in (False, True)
    ]
    result = {"studies": num_studies, "cases": [asdict(case) for case in cases]}
    (HERE / "simulation.json").write_text(json.dumps(result, indent=1) + "\n")
    for case in cases:
        print(case)


if __name__ == "__main__":
    main()
