"""Run the fast commands of README.md and of the documentation on a small run."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run.conftest import PYTHONPATH, Runner
from tests.support.document_commands import REPOSITORY, find_shell_blocks, list_commands

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
TABLE_COMMAND = re.compile(r"`(hlat [^`]+)`")
# Commands that take seconds and need the runs x, a and b only. test_guides.py runs the guides,
# test_documents.py composes the others.
FAST = re.compile(
    r"hlat (plan (?!from_nxdt|calibrate)|cluster |report runs/(x|a runs/b)(?! serve)|average runs/x last"
    r"|checkpoint (?!.*step=100).* runs/x|export runs/x output)"
)
DOES_NOT_FIT = "hlat plan model=70b precision=mixed hardware=trn1_32xl hardware.nodes=4"
"""An example of planning.md that the planner rejects with exit code 2."""
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("commands")]


def _list_fast_commands() -> list[str]:
    texts = [page.read_text() for page in PAGES]
    cells = [c for text in texts for c in TABLE_COMMAND.findall(text)]
    blocks = [c for page in PAGES for b in find_shell_blocks(page) for c in list_commands(b)]
    return [command for command in dict.fromkeys([*blocks, *cells]) if FAST.match(command)]


COMMANDS = _list_fast_commands()


def run_command(command: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, small: list[str]) -> Path:
    """Return a directory with the runs x, a and b of ten steps, with averages, signed with key.pem."""
    runner = Runner(tmp_path_factory.mktemp("commands"), small)
    assert run_command("hlat checkpoint keygen key.pem", runner.folder).returncode == 0
    signed = runner.run(
        "run.name=x", "run.steps=10", "optimizer.ema_decay=0.9", "checkpoint.signing_key=key.pem"
    )
    assert signed.returncode == 0
    for name in ("a", "b"):
        shutil.copytree(runner.folder / "runs/x", runner.folder / "runs" / name)
    (runner.folder / "Qwen3-8B").mkdir()
    (runner.folder / "Qwen3-8B/config.json").write_text(json.dumps(QWEN3_8B))
    return runner.folder


@pytest.mark.parametrize("command", COMMANDS)
def test_command_runs(command: str, folder: Path) -> None:
    for output in ("exported", "runs/x/averages"):
        shutil.rmtree(folder / output, ignore_errors=True)
    done = run_command(command, folder)
    assert done.returncode == (2 if command == DOES_NOT_FIT else 0), done.stderr
    assert done.stdout


def test_commands_of_all_entries_are_found() -> None:
    assert {command.split()[1] for command in COMMANDS} >= {
        *("plan", "cluster", "report", "average", "checkpoint", "export")
    }
    assert DOES_NOT_FIT in COMMANDS
