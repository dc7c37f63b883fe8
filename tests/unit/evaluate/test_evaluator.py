"""Output files and signals of an evaluation."""

import os
import signal
import time
from pathlib import Path

import pytest

from hlat.evaluate import __main__ as evaluate
from hlat.evaluate import evaluator


def test_reject_outputs_before_the_evaluation(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(IsADirectoryError):
        evaluator._validate_output(tmp_path)
    with pytest.raises((FileExistsError, NotADirectoryError)):
        evaluator._validate_output(tmp_path / "file/scores.json")
    evaluator._validate_output(tmp_path / "new/scores.json")
    assert (tmp_path / "new").is_dir()


@pytest.mark.filterwarnings("ignore:This process")  # of a fork with threads
def test_workers_that_a_library_forks_do_not_handle_the_signals_of_the_evaluation() -> None:
    ready, write = os.pipe()
    with evaluate._interrupt_on_signal() as received:
        if (child := os.fork()) == 0:
            try:
                os.write(write, b"x")
                time.sleep(60)
            finally:  # with the handler of the parent, an exception
                os._exit(1)
        assert os.read(ready, 1) == b"x"
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM
    assert not received.is_set()
