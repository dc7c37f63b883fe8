"""Spikes by the paper's definition; finite numbers by arithmetic's; and when a run is lost."""

import math

import pytest

from hlat.config.recovery import RecoveryConfig
from hlat.engine.interface import StepMetrics
from hlat.recovery.spike_detector import SpikeDetector, is_finite


def numbers(grad_norm=1.0, loss=1.0, param_norm=1.0):
    return StepMetrics(loss, grad_norm, param_norm)


def spikes(watch, norms):
    found = []
    for step, norm in enumerate(norms, 1):
        watch.update(step, numbers(norm))
        found.append(watch.is_spike)
    return found


def watch_of(window, patience=1000, recent=()):
    return SpikeDetector(RecoveryConfig(spike_window=window, rollback_after=patience), recent)


def test_a_spike_exceeds_the_running_average_by_the_margin():
    watch = watch_of(20)
    assert not any(spikes(watch, [1.0] * 20))
    assert spikes(watch, [1.09, 1.2]) == [False, True]
    assert watch.average_grad_norm == pytest.approx(1.0045)


def test_nothing_is_a_spike_while_the_window_fills():
    assert spikes(watch_of(3), (1.0, 9.0, 1.0, 9.0)) == [False, False, False, True]


def test_the_window_forgets():
    assert spikes(watch_of(2), (5.0, 5.0, 1.0, 1.0, 1.2)) == [False, False, False, False, True]


def test_a_high_loss_is_bad_but_no_spike():
    watch = watch_of(2)
    for step, loss in enumerate((1.0, 1.0, 1.2), 1):
        watch.update(step, numbers(loss=loss))
    assert not watch.is_spike
    assert watch.first_bad_step == 3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_finite(bad):
    assert is_finite(StepMetrics(1.0, 1.0, 1.0))
    assert not is_finite(StepMetrics(bad, 1.0, 1.0))
    assert not is_finite(StepMetrics(1.0, bad, 1.0))
    assert not is_finite(StepMetrics(1.0, 1.0, bad))


def test_a_resumed_run_judges_as_if_it_had_not_stopped():
    norms = [1.0, 1.0, 1.0, 5.0, 9.0, 20.0, 40.0, 1.0]
    whole = watch_of(2, patience=4)
    verdicts = [whole.update(step, numbers(norm)) for step, norm in enumerate(norms)]
    assert verdicts == [False] * 6 + [True, False]
    for cut in range(2, 8):
        seen = [(step, numbers(norm)) for step, norm in enumerate(norms[:cut])]
        resumed = watch_of(2, patience=4, recent=seen)
        rest = [resumed.update(step, numbers(norms[step])) for step in range(cut, 8)]
        assert rest == verdicts[cut:]


def test_a_number_that_is_not_one_does_not_spoil_the_average():
    watch = watch_of(2)
    assert spikes(watch, [1.0, 1.0, math.nan, 2.0]) == [False, False, False, True]


def test_a_run_is_lost_after_so_many_bad_steps_in_a_row_and_no_sooner():
    watch = watch_of(20, patience=3)
    rises = [1.0] * 20 + [2.0, 3.0, 1.0] + [4.0, 5.0, 6.0]
    verdicts = [watch.update(step, numbers(norm)) for step, norm in enumerate(rises, 1)]
    assert verdicts == [False] * 25 + [True]
    assert watch.first_bad_step == 24


def test_gradients_that_are_not_finite_are_bad_steps():
    watch = watch_of(20, patience=3)
    verdicts = [watch.update(step, numbers(math.nan, math.nan)) for step in (1, 2, 3)]
    assert verdicts == [False, False, True]


def test_weights_that_are_not_finite_are_lost_at_once():
    assert watch_of(20).update(7, numbers(param_norm=math.inf))


def test_a_lasting_jump_is_noticed_before_it_is_the_average():
    """Of a jump by d, the average of w values takes w (1 - margin / d) steps to catch up."""
    recovery = RecoveryConfig()
    watch = SpikeDetector(recovery)
    norms = [1.0] * recovery.spike_window + [1.6] * recovery.spike_window
    assert any(watch.update(step, numbers(norm)) for step, norm in enumerate(norms))
