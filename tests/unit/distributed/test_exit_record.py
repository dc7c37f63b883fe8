"""Start of a supervised worker."""

import os
import subprocess
import sys

import pytest

from hlat.distributed import rank_environment


@pytest.mark.parametrize(("parent_is_alive", "output"), [(True, "trains\n"), (False, "")])
def test_an_orphan_exits_before_training(tmp_path, parent_is_alive: bool, output: str) -> None:
    """Kill the supervisor during a launch, when it cannot terminate the worker."""
    program = (
        "from hlat.distributed.exit_record import run_with_exit_record\n"
        "from hlat.config.config_errors import ExitCode\n"
        "run_with_exit_record(lambda: print('trains', flush=True) or ExitCode.FINISHED)"
    )
    parent = os.getpid() if parent_is_alive else 1
    variables = {
        rank_environment.RECORDS_DIR_ENV: str(tmp_path),
        rank_environment.PARENT_PID_ENV: str(parent),
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | variables, capture_output=True, text=True
    )
    assert done.stdout == output, done.stderr
    assert (done.returncode == 0) is parent_is_alive
