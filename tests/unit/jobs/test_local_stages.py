"""Signals to a campaign on this machine."""

import sys
from pathlib import Path

import pytest

from hlat.distributed.process_signals import DUMP_SIGNAL
from hlat.jobs import local_stages
from hlat.jobs.campaign_state import CampaignLog, StageState, StageStatus
from hlat.jobs.stage_job import StageJob

PROGRAM = """
import os, pathlib, signal, sys, time
signal.signal({number}, lambda *_: pathlib.Path("dumped").touch())
end = time.monotonic() + {seconds}
while not os.path.exists("dumped") and time.monotonic() < end:
    os.kill(os.getppid(), {number})
    time.sleep(0.02)
sys.exit(not os.path.exists("dumped"))
"""


@pytest.mark.parametrize(("kind", "seconds", "code"), [("train", 30, 0), ("average", 0.1, 1)])
def test_stacks_are_those_of_the_training_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, seconds: float, code: int
) -> None:
    """The campaign continues; the signal would end another command, which does not receive it."""
    monkeypatch.chdir(tmp_path)
    program = PROGRAM.format(number=DUMP_SIGNAL.value, seconds=seconds)
    command = [sys.executable, "-S", "-c", program]
    monkeypatch.setattr(local_stages, "build_module_command", lambda *_: command)
    jobs = [StageJob("a", "a", kind, (), (), {}, "a", "a")]
    statuses = {"a": StageStatus(StageState.ready)}
    assert local_stages.LocalStages(CampaignLog(tmp_path)).run(jobs, statuses) == code
