"""Exit record of a worker, with which its supervisor finds the cause of a failure."""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from hlat.config.config_errors import ConfigError, ExitCode
from hlat.config.redaction import redact_data
from hlat.distributed.process_signals import kill_with_parent, register_stack_dumps
from hlat.distributed.rank_environment import PARENT_PID_ENV, RECORDS_DIR_ENV, read_rank_info
from hlat.storage.durable_files import replace_file


class SetupStoppedError(BaseException):
    """A stop signal before training, when there is nothing to save; the text is its name."""


def run_with_exit_record(run: Callable[[], ExitCode]) -> ExitCode:
    """Run, and write an exit record if the supervisor launched this process.

    TorchElastic terminates all workers as soon as one of them exits with a code other than 0. An
    exit that all workers agreed on therefore returns 0 and records the exit code of the run.
    Another exit records its time, with which the supervisor finds the cause.
    """
    if RECORDS_DIR_ENV not in os.environ:
        return run()
    _exit_with_parent()
    register_stack_dumps()
    path = Path(os.environ[RECORDS_DIR_ENV]) / f"{read_rank_info().rank}.json"
    try:
        replace_file(path, json.dumps({"exit": run()}).encode())
    except (Exception, SetupStoppedError) as error:
        problems = error.problems if isinstance(error, ConfigError) else None
        code = ExitCode.FAILED if problems is None else ExitCode.CONFIGURATION
        if isinstance(error, SetupStoppedError):
            code = ExitCode.PREEMPTED
        trace = traceback.format_exc()
        record = {"exit": code, "time": time.time(), "problems": problems, "trace": trace}
        replace_file(path, json.dumps(redact_data(record)).encode())
        sys.stdout.flush()
        # A normal exit would wait for threads that are blocked in collectives with dead ranks
        os._exit(code)
    return ExitCode.FINISHED


def _exit_with_parent() -> None:
    """Call `kill_with_parent`, and exit if the parent has died already.

    An orphan would lock the run directory and wait for its peers forever.
    """
    kill_with_parent()
    if os.getppid() != int(os.environ[PARENT_PID_ENV]):
        os._exit(ExitCode.FAILED)
