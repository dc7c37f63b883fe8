"""First failure among the workers of a node, from their exit codes and exit records.

When a worker fails, its peers fail soon after it, and TorchElastic terminates the others.
"""

import json
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hlat.config.config_errors import ExitCode
from hlat.distributed.process_signals import STOP_SIGNALS
from hlat.recovery.failure_coordinator import Failure


def diagnose_failure(
    exit_codes: Mapping[int, int], records_dir: Path, num_oom_kills: int
) -> Failure:
    """Return the first failure, given the exit codes of failed workers by rank.

    `num_oom_kills` is `count_oom_kills()` before the workers started.
    """
    killed = {rank: -code for rank, code in exit_codes.items() if code < 0}
    records = {path.stem: json.loads(path.read_text()) for path in records_dir.glob("*.json")}
    raised = {rank: record for rank, record in records.items() if "trace" in record}
    # TorchElastic ends the peers of a rank that raises by SIGTERM; peers of a killed rank raise
    if killed and not (raised and {*killed.values()} == {signal.SIGTERM}):
        return _diagnose_signal(killed, len(killed) == len(exit_codes), num_oom_kills)
    if raised:
        return _diagnose_exception(raised)
    rank = min(exit_codes)
    code = exit_codes[rank]
    has_meaning = code in (ExitCode.UNHEALTHY_NODE, ExitCode.PREEMPTED)
    exit_code = ExitCode(code) if has_meaning else ExitCode.FAILED
    return Failure(f"rank {rank} exited with code {code}", exit=exit_code, time=time.time())


def _diagnose_signal(killed: Mapping[int, int], all_killed: bool, num_oom_kills: int) -> Failure:
    """Return the failure of the first rank that a signal other than SIGTERM ended, if any."""
    rank, signum = min(killed.items(), key=lambda item: (item[1] == signal.SIGTERM, item))
    reason = f"rank {rank} was killed by {signal.Signals(signum).name}"
    if count_oom_kills() > num_oom_kills and signum == signal.SIGKILL:
        reason += " (out of memory)"
    if signum == signal.SIGBUS:
        reason += " (a mapped file was truncated, or its disk is full or failed)"
    # A stop signal so early that the worker did not handle it
    is_stopped = signum in STOP_SIGNALS and all_killed
    exit_code = ExitCode.PREEMPTED if is_stopped else ExitCode.FAILED
    return Failure(reason, exit=exit_code, killed=signum != signal.SIGTERM, time=time.time())


def _diagnose_exception(raised: Mapping[str, dict[str, Any]]) -> Failure:
    """Return the failure of the first rank that raised, given exit records by rank."""
    rank, record = min(raised.items(), key=lambda item: item[1]["time"])
    reason = f"rank {rank} raised {record['trace'].rstrip().splitlines()[-1]}"
    trace = f"rank {rank} failed:\n{record['trace']}"
    problems = tuple(record["problems"] or ())
    return Failure(reason, trace, problems, ExitCode(record["exit"]), time=record["time"])


def count_oom_kills() -> int:
    """Return the number of out-of-memory kills since Linux was started; 0 on other systems."""
    with suppress(OSError):
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counters.get("oom_kill", 0))
    return 0
