"""Run the commands of every guide in docs/guides, in order."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.document_commands import (
    REPOSITORY,
    find_config_problems,
    find_shell_blocks,
    list_commands,
)

GUIDES = sorted((REPOSITORY / "docs/guides").glob("*.md"))
# The first line of a block that needs more than this machine. Its runs are composed and validated only.
COMPOSED_ONLY = re.compile(r"# (needs|takes) ")
# Commands of a checkout; test_documents.py checks that the targets of make exist
INSTALL = ("make ", "source .venv/")
# These take 7 to 90 seconds on two cores
SLOW = {
    "first-run",
    "first-ablation",
    "first-day",
    "own-data",
    "own-files",
    "own-idea",
    "recover-a-failed-run",
    "reproduce-the-paper",
    "scaling",
    "trn1-to-trn2",
}


def _blocks(guide: Path, composed_only: bool) -> list[str]:
    return [
        block
        for block in find_shell_blocks(guide)
        if bool(COMPOSED_ONLY.match(block)) is composed_only
    ]


@pytest.mark.parametrize(
    "guide",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in SLOW else [])
        for path in GUIDES
    ],
)
@pytest.mark.slow
def test_commands_run(guide: Path, tmp_path: Path) -> None:
    programs, folder, modules = tmp_path / "bin", tmp_path / "work", tmp_path / "modules"
    for path in (programs, folder, modules):
        path.mkdir()
    for name, arguments in (("hlat", '-m hlat "$@"'), ("python", '"$@"')):
        (programs / name).write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments}\n")
        (programs / name).chmod(0o755)
    (modules / "sitecustomize.py").write_text(
        (REPOSITORY / "tests/fakes/skip_figures.py").read_text()
    )
    lines = "".join(_blocks(guide, composed_only=False)).splitlines(keepends=True)
    script = "".join(line for line in lines if not line.startswith(INSTALL))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-x", "-c", script],
        cwd=folder,
        env=os.environ
        | {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{modules}",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-6000:]


def _composed_only() -> list[tuple[str, str]]:
    return [
        (guide.stem, command)
        for guide in GUIDES
        for block in _blocks(guide, composed_only=True)
        for command in list_commands(block)
    ]


@pytest.mark.parametrize(("guide", "command"), _composed_only())
@pytest.mark.slow_after(6)
def test_other_commands_compose(guide: str, command: str, compose) -> None:
    program, name, *_ = shlex.split(command)
    assert program == "hlat"
    module = REPOSITORY / "hlat" / name
    assert module.is_dir() or module.with_suffix(".py").is_file() or name == "sweep"
    if name in ("train", "sweep"):
        assert not find_config_problems(command, compose), guide


def test_there_are_twelve_guides() -> None:
    assert len(GUIDES) == 12
    assert {path.stem for path in GUIDES} >= SLOW
