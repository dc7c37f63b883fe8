"""Spike score of a series."""

import numpy as np
import pytest

from hlat.tracking.spike_score import compute_spike_score


def compute_directly(values: np.ndarray) -> float:
    """Return the score with a loop over the steps."""
    spikes = []
    for n in range(32, len(values)):
        earlier = values[max(0, n - 1000) : n]
        spikes.append(values[n] > earlier.mean() + 7 * earlier.std())
    return float(np.mean(spikes))


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
def test_score_equals_a_loop_at_any_scale_and_offset(scale: float) -> None:
    generator = np.random.default_rng(3)
    values = 5 + generator.normal(0, 0.1, 2500)
    values[[40, 700, 701, 2400]] += [2.0, 5.0, 5.0, -5.0]
    score = compute_spike_score([*(scale * values)])
    assert score == compute_directly(values) == 3 / 2468


def test_short_and_constant_series() -> None:
    assert compute_spike_score([1.0] * 32) is None
    assert compute_spike_score([0.1] * 33) == 0.0
