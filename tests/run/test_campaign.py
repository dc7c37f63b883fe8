"""Campaigns as a user starts them: on this machine, and on Kubernetes with a fake kubectl."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hlat.jobs import campaign
from tests.run.conftest import PYTHONPATH, CommandResult, call_command

CHAIN = """\
train: {overrides}
stages:
  first: {{train: [run.steps=10]}}
  second: {{train: [], start_from: first}}
  mean: {{average: second, last: 2}}
  report: {{report: all}}
"""
KUBECTL = """\
#!/bin/sh
here="$(dirname "$0")"
echo "$@" >> "$here/asked"
case "$1" in get) cat "$here/answer";; esac
"""


@pytest.fixture
def folder(tmp_path: Path, small: list[str]) -> Path:
    (tmp_path / "chain.yaml").write_text(CHAIN.format(overrides=json.dumps(small)))
    return tmp_path


def start(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "hlat.jobs.campaign", "chain.yaml", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def call(folder: Path, *arguments: str) -> CommandResult:
    return call_command(campaign.main, folder, "chain.yaml", *arguments)


def states(folder: Path) -> list[str]:
    done = call(folder, "status=true", "json=true")
    assert done.code == 0, done.err
    return [row["state"] for row in json.loads(done.out)]


@pytest.mark.slow  # six processes that import torch
def test_continue_after_ctrl_c_an_edit_and_a_failure(folder: Path, monkeypatch) -> None:
    signalled = folder / "signalled"
    monkeypatch.setenv("HLAT_TEST_PAUSE", f"7:{signalled}")  # training waits in step 7
    first = start(folder)
    monkeypatch.delenv("HLAT_TEST_PAUSE")
    log = folder / "runs/chain/first/metrics.jsonl"
    while not (log.exists() and log.read_bytes().count(b"\n") >= 7):
        assert first.poll() is None
        time.sleep(0.02)
    busy = call(folder)
    assert busy.code == 2
    assert "another hlat campaign command uses runs/chain" in busy.err
    first.send_signal(signal.SIGINT)
    time.sleep(1)  # the campaign forwards it
    signalled.touch()
    out, err = first.communicate()
    assert first.returncode == 75, out + err
    assert "continue with: hlat campaign chain.yaml" in out
    assert states(folder) == ["interrupted", "waiting", "waiting", "waiting"]

    file = folder / "chain.yaml"
    file.write_text(file.read_text().replace("last: 2", "last: 3"))
    second = start(folder)
    out, err = second.communicate()
    assert second.returncode == 2, out + err
    assert "has only 2 checkpoints" in err
    assert states(folder) == ["finished", "finished", "failed", "waiting"]

    file.write_text(file.read_text().replace("last: 3", "last: 2"))
    third = start(folder)
    out, err = third.communicate()
    assert third.returncode == 0, out + err
    assert out.count("==> ") == 2, "finished stages are not repeated"
    assert states(folder) == ["finished"] * 4
    page = (folder / "runs/chain/campaign.html").read_text()
    assert "mean: finished, after second" in page
    assert "report: finished" in page

    file.write_text(file.read_text().replace("run.steps=10", "run.steps=10, run.log_every=2"))
    done = call(folder, "status=true")
    assert "finished (settings changed)" in done.out
    assert call(folder, "repeat=frist").err == (
        "hlat: repeat=frist is not a stage; did you mean first?\n"
    )


@pytest.mark.slow  # 8 s: trains the stages of a campaign
def test_create_the_next_stages_on_kubernetes(folder: Path, tmp_path_factory, monkeypatch) -> None:
    programs = tmp_path_factory.mktemp("programs")
    (programs / "kubectl").write_text(KUBECTL)
    (programs / "kubectl").chmod(0o755)
    (programs / "answer").write_text(json.dumps({"items": [{"kind": "ConfigMap"}, {"status": {}}]}))
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    chosen = ("hydra/launcher=kubernetes", "hydra.launcher.image=registry.example/hlat:1")
    done = call(folder, *chosen)
    assert done.code == 0, done.err
    assert "JobSet hlat-first trains " in done.out
    assert states(folder) == ["submitted", "waiting", "waiting", "waiting"]
    asked = (programs / "asked").read_text()
    assert asked.count("create") == 2, "the cluster validates the manifest first"

    condition = {"type": "Completed", "status": "True"}
    answer = {"items": [{"status": {"conditions": [condition]}}]}
    (programs / "answer").write_text(json.dumps(answer))
    done = call(folder)  # with the launcher of the first command
    assert done.code == 0, done.err
    assert "JobSet hlat-second trains " in done.out
    assert states(folder) == ["finished", "submitted", "waiting", "waiting"]

    failed = {"items": [{"status": {"conditions": [condition | {"type": "Failed"}]}}]}
    (programs / "answer").write_text(json.dumps(failed))
    done = call(folder, "wait=true")
    assert done.code == 1, done.out + done.err
    assert "continue with: hlat campaign chain.yaml" in done.out
    assert states(folder) == ["finished", "failed", "waiting", "waiting"]
