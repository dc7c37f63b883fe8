"""Ranges of axes that outliers do not determine."""

import numpy as np
import pytest

from hlat.figures.report_figure import compute_robust_range


def test_outliers_do_not_determine_the_range() -> None:
    values = np.array([*np.linspace(1, 2, 98), 44.0, -30.0])
    limits = compute_robust_range(values)
    assert limits is not None
    bottom, top = limits
    assert -1 < bottom < 1
    assert 2 < top < 4


@pytest.mark.parametrize(
    "values",
    [np.linspace(0, 1, 100), np.array([1.0, 44.0]), np.array([1.0] * 50 + [44.0]), np.array([])],
    ids=["even", "few", "constant", "none"],
)
def test_other_values_have_no_robust_range(values: np.ndarray) -> None:
    assert compute_robust_range(values) is None
