"""Readers of foreign bytes give a value or a documented error; see docs/adr/0046."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.fuzzer import replay
from tests.fuzz.targets import TARGETS

REPOSITORY = Path(__file__).resolve().parents[2]
REGRESSIONS = Path(__file__).with_name("regressions")


@pytest.mark.parametrize("name", TARGETS)
def test_replay_seeds_and_regressions(name: str) -> None:
    paths = sorted((REGRESSIONS / name).glob("*"))
    result = replay(TARGETS[name], [path.read_bytes() for path in paths])
    assert not result.findings
    assert result.executions > len(paths)


def test_regressions_belong_to_targets() -> None:
    assert {path.name for path in REGRESSIONS.iterdir()} <= {*TARGETS}


@pytest.mark.slow  # takes --fuzz-seconds
def test_find_nothing(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    seconds = request.config.getoption("--fuzz-seconds")
    command = [sys.executable, "-m", "tests.fuzz", f"--seconds={seconds}"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    output = tmp_path / "fuzz.json"
    done = subprocess.run(
        [*command, f"--output={output}"],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    executions = {
        row["target"]: row["executions"] for row in json.loads(output.read_text())["targets"]
    }
    assert executions.keys() == TARGETS.keys()
    assert all(executions.values())
