"""Spikes by the paper's definition; finite numbers by arithmetic's."""

import pytest

from hlat.config.recovery import Recovery
from hlat.engine.interface import Numbers
from hlat.recovery.divergence import SpikeWatch, finite


def test_a_spike_exceeds_the_running_average_by_the_margin():
    watch = SpikeWatch(Recovery(spike_window=20))
    assert not any(watch.is_spike(1.0) for _ in range(20))
    assert not watch.is_spike(1.09)
    assert watch.is_spike(1.2)


def test_nothing_is_a_spike_while_the_window_fills():
    watch = SpikeWatch(Recovery(spike_window=3))
    assert [watch.is_spike(norm) for norm in (1.0, 9.0, 1.0, 9.0)] == [False, False, False, True]


def test_the_window_forgets():
    watch = SpikeWatch(Recovery(spike_window=2))
    norms = (5.0, 5.0, 1.0, 1.0, 1.2)
    assert [watch.is_spike(norm) for norm in norms] == [False, False, False, False, True]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_finite(bad):
    assert finite(Numbers(1.0, 1.0, 1.0))
    assert not finite(Numbers(bad, 1.0, 1.0))
    assert not finite(Numbers(1.0, bad, 1.0))
    assert not finite(Numbers(1.0, 1.0, bad))


def test_a_resumed_run_judges_as_if_it_had_not_stopped():
    norms = [1.0, 1.0, 5.0, 1.0, 1.2, 9.0]
    whole = SpikeWatch(Recovery(spike_window=2))
    verdicts = [whole.is_spike(norm) for norm in norms]
    resumed = SpikeWatch(Recovery(spike_window=2), norms[1:3])
    assert [resumed.is_spike(norm) for norm in norms[3:]] == verdicts[3:]


def test_a_number_that_is_not_one_does_not_spoil_the_average():
    watch = SpikeWatch(Recovery(spike_window=2), [1.0, 1.0])
    assert not watch.is_spike(float("nan"))
    assert not watch.is_spike(None)
    assert watch.is_spike(2.0)
