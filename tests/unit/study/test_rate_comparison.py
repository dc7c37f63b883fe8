"""Comparison of settings over a grid of learning rates, with known optima and divergences."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from hlat.config.study import LrGridConfig, StudyConfig
from hlat.report.__main__ import main as report
from hlat.report.rate_figure import build_rate_figure
from hlat.study.paired_test import PointRuns
from hlat.study.rate_comparison import (
    LOWEST,
    SENSITIVITY,
    analyze_rate_criteria,
    compare_divergence,
)
from hlat.study.run_comparison import load_run_records
from hlat.study.study_analysis import Point, Verdict
from hlat.study.study_result import build_study_result
from hlat.study.study_tables import build_result_tables

pytestmark = pytest.mark.usefixtures("without_png")

RATES = (0.1, 0.2, 0.4)
SEEDS = ("1", "2", "3", "4")
DESIGN = StudyConfig(
    baseline={"beta2": "0.95"},
    smallest_difference=0.02,
    lr_grid=LrGridConfig(factor=2.0, center=0.2, below=1, above=1),
)
INITIAL = 8.0


def build_points(
    losses: dict[str, tuple[float, float, float]], noise: float = 0.001
) -> tuple[dict[Point, PointRuns], dict[Point, dict[str, float]]]:
    """Return the runs of each beta2 and rate; a run with an infinite loss diverged."""
    points, initial = {}, {}
    for beta2, by_rate in losses.items():
        for rate, loss in zip(RATES, by_rate, strict=True):
            point = (("optimizer.lr", str(rate)), ("beta2", beta2))
            finite = {
                seed: loss + 0.1 * n + noise * ((7 * n + int(100 * rate)) % 3)
                for n, seed in enumerate(SEEDS)
                if math.isfinite(loss)
            }
            points[point] = PointRuns(finite, frozenset(SEEDS) - finite.keys())
            initial[point] = dict.fromkeys(SEEDS, INITIAL)
    return points, initial


def test_lowest_value_and_sensitivity_are_those_of_their_definitions() -> None:
    points, initial = build_points({"0.95": (3.0, 2.0, 4.0), "0.99": (3.0, 2.0, 9.0)}, noise=0)
    lowest, sensitivity = analyze_rate_criteria(points, initial, DESIGN)
    assert (lowest.name, sensitivity.name) == (LOWEST, SENSITIVITY)
    assert lowest.design.alpha == sensitivity.design.alpha == DESIGN.alpha / 2
    base, other = (("beta2", "0.95"),), (("beta2", "0.99"),)
    assert lowest.points[base].values == pytest.approx({"1": 2.0, "2": 2.1, "3": 2.2, "4": 2.3})
    assert sensitivity.points[base].values == pytest.approx(dict.fromkeys(SEEDS, 1.0))
    expected = {seed: (1 + 0 + INITIAL - 2 - 0.1 * n) / 3 for n, seed in enumerate(SEEDS)}
    assert sensitivity.points[other].values == pytest.approx(expected)
    assert [one.verdict for one in lowest.comparisons] == [Verdict.equal]


def test_a_diverged_run_has_the_initial_loss_and_no_lowest_value() -> None:
    points, initial = build_points({"0.95": (3.0, 2.0, 4.0), "0.99": (3.0, 2.0, math.inf)})
    lowest, sensitivity = analyze_rate_criteria(points, initial, DESIGN)
    (sensitive,), (best,) = sensitivity.comparisons, lowest.comparisons
    assert sensitive.verdict is Verdict.worse
    assert sensitive.difference.mean == pytest.approx((INITIAL - 4.15) / 3, abs=0.01)
    assert best.verdict is Verdict.equal
    points, initial = build_points({"0.95": (3.0, 2.0, 4.0), "0.99": (math.inf,) * 3})
    lowest, _ = analyze_rate_criteria(points, initial, DESIGN)
    assert not lowest.points[(("beta2", "0.99"),)].values


def test_seeds_without_all_rates_do_not_count() -> None:
    points, initial = build_points({"0.95": (3.0, 2.0, 4.0), "0.99": (3.0, 2.0, 4.0)})
    point = (("optimizer.lr", "0.4"), ("beta2", "0.99"))
    points[point] = PointRuns({"1": 4.0, "3": 4.2})
    lowest, _ = analyze_rate_criteria(points, initial, DESIGN)
    assert [*lowest.points[(("beta2", "0.99"),)].values] == ["1", "3"]
    assert lowest.comparisons[0].difference.num_pairs == 2


def test_divergence_is_tested_by_pairs_of_rate_and_seed() -> None:
    assert compare_divergence(build_points({"0.95": (3.0, 2.0, 4.0)})[0], DESIGN) == []
    points, _ = build_points({"0.95": (3.0, 2.0, 4.0), "0.99": (3.0, math.inf, math.inf)})
    (found,) = compare_divergence(points, DESIGN)
    assert (found.num_pairs, found.num_diverged, found.num_baseline_diverged) == (12, 8, 0)
    assert found.p_value == pytest.approx(stats.binomtest(8, 8).pvalue)


def test_the_report_states_both_criteria_divergence_and_draws_the_rates(
    tmp_path: Path, write_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for beta2, penalty in (("0.95", 0.0), ("0.99", 0.5)):
        for seed in (1, 2, 3):
            for rate in (0.05, 0.1, 0.2, 0.4):
                is_high = rate == 0.4 and beta2 == "0.99"
                run_dir = write_run(
                    f"b{beta2}_s{seed}_lr{rate}",
                    lr=rate,
                    seed=seed,
                    bits=2 + 0.1 * seed + (0.05 + penalty) * math.log2(rate / 0.1) ** 2,
                    end="diverge" if is_high else "finish",
                    settings={
                        "optimizer": {"lr": rate, "beta2": float(beta2), "name": "adamw"},
                        "study": {
                            "question": "Is 0.99 less stable?",
                            "baseline": {"optimizer.beta2": 0.95},
                            "smallest_difference": 0.02,
                            "lr_grid": {"factor": 2.0, "center": 0.1, "below": 1, "above": 2},
                        },
                    },
                )
                events = (run_dir / "events.jsonl").read_text().splitlines()
                first = {"event": "evaluate", "step": 0, "attempt": 1, "time": 1000.5}
                first |= {"bits_per_byte": {"code": 9.0, "mean": 8.0}}
                lines = [events[0], json.dumps(first), *events[1:]]
                (run_dir / "events.jsonl").write_text("\n".join(lines) + "\n")
                row = {"step": 5, "tokens": 512, "loss": 3.0, "time": 1005.0}
                row |= {"output_logit_max": 20 * rate, "attention_logit_max": 30 * rate}
                (run_dir / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    report([str(tmp_path / "runs"), f"output={tmp_path}"])
    text = capsys.readouterr().out
    result = build_study_result(load_run_records([tmp_path / "runs"]))
    assert result is not None
    sensitive = next(line for line in result.verdicts if line.startswith(SENSITIVITY))
    assert "optimizer.beta2=0.99 is worse than optimizer.beta2=0.95" in sensitive
    assert "diverged runs: optimizer.beta2=0.99 - optimizer.beta2=0.95: 3 and 0 of 12" in text
    page = (tmp_path / "comparison.html").read_text()
    captions = [*build_result_tables(result)]
    assert len(captions) == 5
    assert all(caption.replace("'", "&#39;") in page for caption in captions)
    assert "Largest attention logit" in page
    figure = build_rate_figure(result)
    assert "optimizer.beta2=0.95: best 2.2000 at 0.1" in figure.alt_text
    assert "diverged at 0.4" in figure.alt_text
    assert (tmp_path / "comparison" / "rates.svg").exists()


def test_the_error_of_the_text_is_that_of_the_best_rate_and_of_the_mean() -> None:
    """Perturb the documents: the influences are the derivatives of both criteria."""
    generator = np.random.default_rng(2)
    influences = {
        (beta2, rate): generator.normal(0, 0.01, 6) for beta2 in ("0.95", "0.99") for rate in RATES
    }
    losses = {"0.95": (3.0, 2.0, 4.0), "0.99": (3.0, 2.5, 9.0)}

    def compute(shift: np.ndarray) -> list[dict[str, float]]:
        points, initial = {}, {}
        for (beta2, rate), each in influences.items():
            loss = losses[beta2][RATES.index(rate)] + float(each @ shift)
            point = (("optimizer.lr", str(rate)), ("beta2", beta2))
            points[point] = PointRuns({"1": loss}, influences={"1": each})
            initial[point] = {"1": INITIAL}
        return [
            {dict(point)["beta2"]: runs for point, runs in one.points.items()}
            for one in analyze_rate_criteria(points, initial, DESIGN)
        ]

    for criterion, (base, *shifted) in enumerate(
        zip(*(compute(shift) for shift in (np.zeros(6), *np.eye(6) * 1e-3)), strict=True)
    ):
        for beta2, runs in base.items():
            slopes = [(one[beta2].values["1"] - runs.values["1"]) / 1e-3 for one in shifted]
            assert runs.influences["1"] == pytest.approx(slopes, abs=1e-9), (criterion, beta2)
