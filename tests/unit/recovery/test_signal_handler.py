"""Stop signals before, during and after training, and stacks on SIGQUIT."""

import os
import signal
import subprocess
import sys
import time

import pytest

from hlat.distributed.process_signals import STOP_SIGNALS, block_signals
from hlat.recovery.signal_handler import SignalHandler, handle_signals

PROCESS = """
import signal
from hlat.recovery import signal_handler
with signal_handler.handle_process_signals():
    {statement}
signal.raise_signal(signal.SIGTERM)
print("end")
"""
KILL = "__import__('os').kill(__import__('os').getpid(), signal.{name})"


def run_process(statement: str) -> "subprocess.CompletedProcess[str]":
    """Run a statement in a process that handles signals as a run does."""
    return subprocess.run(
        [sys.executable, "-c", PROCESS.format(statement=statement)], capture_output=True, text=True
    )


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_is_recorded(number):
    before = signal.getsignal(number)
    with SignalHandler() as handler:
        assert handler.signal_name is None
        signal.raise_signal(number)
        assert handler.signal_name == number.name
    assert signal.getsignal(number) is before


def test_further_signals_of_schedulers_have_no_effect():
    with SignalHandler() as handler:
        for number in (signal.SIGUSR1, *STOP_SIGNALS, *STOP_SIGNALS[1:]):
            signal.raise_signal(number)
        assert handler.signal_name == "SIGUSR1"


def test_a_duplicate_is_not_a_second_signal(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("hlat.recovery.signal_handler.time.monotonic", lambda: now[0])
    with SignalHandler(duplicate_window_s=2.0) as handler:
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
            now[0] += 0.9
        assert handler.signal_name == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_the_second_ctrl_c_acts():
    with SignalHandler():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


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


def test_a_hangup_that_nohup_ignores_has_no_effect():
    with handle_signals(signal.SIG_IGN, [signal.SIGHUP]), SignalHandler() as handler:
        signal.raise_signal(signal.SIGHUP)
        assert handler.signal_name is None


@pytest.mark.parametrize("name", ["SIGUSR1", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_a_signal_before_training_ends_the_process_with_exit_code_75(name):
    done = run_process(KILL.format(name=name))
    assert done.returncode == 75
    assert done.stderr == f"\nhlat: {name} before training; no step is lost. Repeat the command\n"
    assert not done.stdout


@pytest.mark.slow  # starts a process
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_after_training_does_not_hide_the_result(name):
    trained = "[handler.__exit__() for handler in [signal_handler.SignalHandler().__enter__()]]"
    done = run_process(f"{trained}; {KILL.format(name=name)}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_sigquit_writes_the_stacks_and_the_process_continues():
    done = run_process(KILL.format(name="SIGQUIT"))
    assert (done.returncode, done.stdout) == (0, "end\n")
    assert 'File "<string>", line 5 in <module>' in done.stderr


def test_child_processes_do_not_receive_blocked_signals():
    with block_signals():
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    for number in (*STOP_SIGNALS, signal.SIGQUIT):
        os.kill(child.pid, number)
    assert child.communicate(b"text") == (b"text", None)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
