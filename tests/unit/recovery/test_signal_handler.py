"""The first signal is recorded, the second acts, and handlers are restored."""

import signal
import time

import pytest

from hlat.recovery.signal_handler import SignalHandler


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_recorded(number):
    before = signal.getsignal(number)
    with SignalHandler() as interruption:
        assert interruption.signal_name is None
        signal.raise_signal(number)
        assert interruption.signal_name == number.name
    assert signal.getsignal(number) is before


def test_a_notice_after_the_run_does_not_end_the_process():
    with SignalHandler() as interruption:
        signal.raise_signal(signal.SIGUSR2)
        assert interruption.signal_name == "SIGUSR2"
    signal.raise_signal(signal.SIGUSR2)
    assert (
        signal.getsignal(signal.SIGUSR2) is not signal.SIG_IGN
    )  # child processes would inherit it


@pytest.mark.usefixtures("_ctrl_c_acts")
def test_a_duplicate_is_not_a_second_signal(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("hlat.recovery.signal_handler.time.monotonic", lambda: now[0])
    with SignalHandler(duplicate_window_s=2.0) as interruption:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
            now[0] += 0.9
        assert interruption.signal_name == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def _ctrl_c_acts():
    """Handle SIGINT as in a terminal; a shell's background processes ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c_acts")
def test_the_second_ctrl_c_acts():
    with SignalHandler():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("_ctrl_c_acts")
@pytest.mark.parametrize("can_abort", [True, False])
def test_a_long_step_is_aborted_if_nothing_is_lost(monkeypatch, can_abort):
    monkeypatch.setattr("hlat.recovery.signal_handler.ABORT_AFTER_S", 0.01)
    aborted = False
    try:
        with SignalHandler(can_abort=lambda: can_abort):
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.5)
    except KeyboardInterrupt:
        aborted = True
    assert aborted is can_abort
