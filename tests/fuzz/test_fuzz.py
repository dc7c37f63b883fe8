"""Readers of foreign bytes give a value or a documented error; see docs/adr/0046."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hlat.config.config_errors import ConfigError
from tests.fuzz import fuzzer
from tests.fuzz.fuzzer import Target, fuzz, replay
from tests.fuzz.mutations import mutate_json
from tests.fuzz.targets import TARGETS

REPOSITORY = Path(__file__).resolve().parents[2]
REGRESSIONS = Path(__file__).with_name("regressions")


DEFAULT = {
    *("tokenizer", "documents", "checkpoint_manifest", "checkpoint_state", "checkpoint_tensors"),
    *("hf_config", "metrics", "run_config", "overrides"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x in DEFAULT else pytest.mark.slow) for x in TARGETS],
)
def test_replay_seeds_and_regressions(name: str) -> None:
    paths = sorted((REGRESSIONS / name).glob("*"))
    result = replay(TARGETS[name], [path.read_bytes() for path in paths])
    assert not result.findings
    assert result.executions > len(paths)


def test_regressions_belong_to_targets() -> None:
    assert {path.name for path in REGRESSIONS.iterdir()} <= {*TARGETS}


def _exceed_memory() -> None:
    content = bytearray(1 << 28)
    time.sleep(60)
    del content


def _raise_other_name() -> None:
    raise ConfigError("y is damaged")


PLANTED = {
    "KeyError": lambda: {}["x"],
    "no planted in the message": _raise_other_name,
    "no result within 1 s": lambda: time.sleep(60),
    "ended with SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "more than 64 MiB of memory": _exceed_memory,
}


@pytest.mark.parametrize("kind", PLANTED)
def test_find_planted_faults(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(fuzzer, "TIMEOUT_S", 1 if "within 1 s" in kind else 30)
    monkeypatch.setattr(fuzzer, "MEMORY_BYTES", 1 << 26)

    def read(_: Path, content: bytes) -> None:
        if b"x" in content:
            PLANTED[kind]()

    target = Target("planted", lambda _: [b'{"a": 1}'], read, mutate_json, "planted")
    kinds: set[str] = set()
    for seconds in (0.5, 5, 30):  # longer on a machine with other work
        kinds |= {finding.kind for finding in fuzz(target, seconds=seconds).findings}
        if kind in kinds:
            break
    assert kind in kinds


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
