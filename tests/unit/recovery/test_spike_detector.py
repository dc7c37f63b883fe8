"""Spikes by the definition of the paper, non-finite metrics, and lost runs."""

import math

import pytest

from hlat.config.recovery import RecoveryConfig
from hlat.engine.interface import StepMetrics
from hlat.recovery.spike_detector import SpikeDetector, is_finite


def metrics(grad_norm=1.0, loss=1.0, param_norm=1.0):
    return StepMetrics(loss, grad_norm, param_norm)


def spikes(detector, norms):
    found = []
    for step, norm in enumerate(norms, 1):
        detector.update(step, metrics(norm))
        found.append(detector.is_spike)
    return found


def new_detector(window, rollback_after=1000, recent=()):
    return SpikeDetector(RecoveryConfig(spike_window=window, rollback_after=rollback_after), recent)


def test_a_spike_exceeds_the_running_average_by_the_margin():
    detector = new_detector(20)
    assert not any(spikes(detector, [1.0] * 20))
    assert spikes(detector, [1.09, 1.2]) == [False, True]
    assert detector.average_grad_norm == pytest.approx(1.0045)


def test_nothing_is_a_spike_while_the_window_fills():
    assert spikes(new_detector(3), (1.0, 9.0, 1.0, 9.0)) == [False, False, False, True]


def test_the_average_excludes_values_before_the_window():
    assert spikes(new_detector(2), (5.0, 5.0, 1.0, 1.0, 1.2)) == [False, False, False, False, True]


def test_a_high_loss_is_bad_but_no_spike():
    detector = new_detector(2)
    for step, loss in enumerate((1.0, 1.0, 1.2), 1):
        detector.update(step, metrics(loss=loss))
    assert not detector.is_spike
    assert detector.first_bad_step == 3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_finite(bad):
    assert is_finite(StepMetrics(1.0, 1.0, 1.0))
    assert not is_finite(StepMetrics(bad, 1.0, 1.0))
    assert not is_finite(StepMetrics(1.0, bad, 1.0))
    assert not is_finite(StepMetrics(1.0, 1.0, bad))


def test_a_resumed_run_gives_the_same_verdicts():
    norms = [1.0, 1.0, 1.0, 5.0, 9.0, 20.0, 40.0, 1.0]
    uninterrupted = new_detector(2, rollback_after=4)
    verdicts = [uninterrupted.update(step, metrics(norm)) for step, norm in enumerate(norms)]
    assert verdicts == [False] * 6 + [True, False]
    for cut in range(2, 8):
        seen = [(step, metrics(norm)) for step, norm in enumerate(norms[:cut])]
        resumed = new_detector(2, rollback_after=4, recent=seen)
        rest = [resumed.update(step, metrics(norms[step])) for step in range(cut, 8)]
        assert rest == verdicts[cut:]


def test_nan_does_not_enter_the_average():
    detector = new_detector(2)
    assert spikes(detector, [1.0, 1.0, math.nan, 2.0]) == [False, False, False, True]


def test_a_run_is_lost_after_consecutive_bad_steps():
    detector = new_detector(20, rollback_after=3)
    rises = [1.0] * 20 + [2.0, 3.0, 1.0] + [4.0, 5.0, 6.0]
    verdicts = [detector.update(step, metrics(norm)) for step, norm in enumerate(rises, 1)]
    assert verdicts == [False] * 25 + [True]
    assert detector.first_bad_step == 24


def test_gradients_that_are_not_finite_are_bad_steps():
    detector = new_detector(20, rollback_after=3)
    verdicts = [detector.update(step, metrics(math.nan, math.nan)) for step in (1, 2, 3)]
    assert verdicts == [False, False, True]


def test_weights_that_are_not_finite_are_lost_at_once():
    assert new_detector(20).update(7, metrics(param_norm=math.inf))


def test_a_lasting_jump_is_detected_before_the_average_follows():
    """Jump by d: the average of w values needs w (1 - margin / d) steps to follow."""
    recovery = RecoveryConfig()
    detector = SpikeDetector(recovery)
    norms = [1.0] * recovery.spike_window + [1.6] * recovery.spike_window
    assert any(detector.update(step, metrics(norm)) for step, norm in enumerate(norms))
