"""Figure of a study whose metric is that of one source."""

import math
from pathlib import Path

import pytest

from hlat.config.study import StudyConfig
from hlat.report.tradeoff_figure import build_tradeoff_figure
from hlat.study.paired_test import PointRuns
from hlat.study.study_analysis import analyze_study
from hlat.study.study_points import StudyPoint
from hlat.study.study_result import StudyResult

SOURCES = {
    "base": {"code": [3.0, 3.1, 3.2], "prose": [2.0, 2.1, 2.2], "data": [2.5, 2.5, 2.6]},
    "upsampled": {"code": [2.8, 2.95, 3.0], "prose": [2.1, 2.19, 2.31], "data": [2.4, 2.4, 2.4]},
}


def build_result(metric: str) -> StudyResult:
    design = StudyConfig(baseline={"phase": "base"}, metric=metric)
    points = {}
    for name, sources in SOURCES.items():
        by_source = {
            source: {str(seed): value for seed, value in enumerate(values)}
            for source, values in sources.items()
        }
        runs = PointRuns(by_source["code"])
        points[("phase", name),] = StudyPoint(runs, (), math.nan, (), {}, by_source)
    outcomes = {point: one.runs for point, one in points.items()}
    return StudyResult(design, points, analyze_study(outcomes, design))


def test_differences_are_paired_by_seed(tmp_path: Path) -> None:
    figure = build_tradeoff_figure(build_result("heldout_bits_per_byte.code"))
    assert figure is not None
    assert "phase=upsampled: code -0.1833" in figure.alt_text
    assert "prose +0.1000" in figure.alt_text
    assert "data -0.1333" in figure.alt_text
    drawn = figure.draw()
    assert [axes.get_xlabel().split(",")[0] for axes in drawn.axes] == ["prose", "data"]
    drawn.savefig(tmp_path / "figure.png")


@pytest.mark.parametrize("metric", ["heldout_bits_per_byte", "final_loss", "scores.arc"])
def test_other_metrics_have_no_figure(metric: str) -> None:
    assert build_tradeoff_figure(build_result(metric)) is None
