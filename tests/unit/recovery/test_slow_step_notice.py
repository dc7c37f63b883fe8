"""Messages during steps that take longer than any step before."""

import threading

from hlat.recovery.slow_step_notice import SlowStepNotice


def test_a_notice_during_a_long_step():
    printed, is_printed = [], threading.Event()

    def print_message(text):
        printed.append(text)
        is_printed.set()

    with SlowStepNotice(print_message, first_notice_s=0.05):
        assert is_printed.wait(10)
    assert printed[0].startswith("a step or evaluation has been running for ")


def test_no_notice_during_steps_of_the_usual_length():
    printed = []
    notice = SlowStepNotice(printed.append, first_notice_s=0.05)
    notice._longest_s = 1000.0
    notice.step()
    with notice:
        assert not notice._stopped.wait(0.2)
    assert printed == []
