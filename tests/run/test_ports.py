"""The processes of one machine listen to nobody else."""

import os
import signal
import time
from pathlib import Path

LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


def listening(process: int) -> set[str]:
    """Addresses that a process accepts connections on, in hexadecimal, without ports."""
    links = [
        os.readlink(path) for path in Path(f"/proc/{process}/fd").iterdir() if path.is_symlink()
    ]
    sockets = {link.removeprefix("socket:[")[:-1] for link in links if link.startswith("socket:")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in sockets:
                found.add(words[1].partition(":")[0])
    return found


def children(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def test_only_this_machine_can_reach_the_processes_of_a_run(runner) -> None:
    started = runner.start(
        "run.name=x", "parallelism.dp=2", "run.steps=1000", "schedule.total_steps=1000"
    )
    while started.poll() is None and len(runner.rows("x", "metrics.jsonl")) < 2:
        time.sleep(0.05)
    ranks = children(started.pid)
    found = {process: listening(process) for process in (started.pid, *ranks)}
    started.send_signal(signal.SIGINT)
    _, err = started.communicate()
    assert len(ranks) == 2, err
    assert found[started.pid] == {"0100007F"}
    assert set().union(*found.values()) <= LOOPBACK
