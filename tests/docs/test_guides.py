"""Run the commands of every guide in docs/guides, in order."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hlat.config.config_validation import VALIDATORS

REPOSITORY = Path(__file__).resolve().parent.parent.parent
GUIDES = sorted((REPOSITORY / "docs/guides").glob("*.md"))
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
# The first line of a block that needs more than this machine. Its runs are composed and validated only.
COMPOSED_ONLY = re.compile(r"# (needs|takes) ")
# Commands of a checkout; test_documents.py checks that the targets of make exist
INSTALL = ("make ", "source .venv/")
# These train several runs, for 20 to 90 seconds on two cores
SLOW = {
    "first-run",
    "first-ablation",
    "own-data",
    "own-model-size",
    "recover-a-failed-run",
    "trn1-to-trn2",
}


def _blocks(guide: Path, composed_only: bool) -> list[str]:
    blocks = BLOCK.findall(guide.read_text())
    return [block for block in blocks if bool(COMPOSED_ONLY.match(block)) is composed_only]


@pytest.mark.parametrize(
    "guide",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in SLOW else [])
        for path in GUIDES
    ],
)
def test_commands_run(guide: Path, tmp_path: Path) -> None:
    programs, folder, modules = tmp_path / "bin", tmp_path / "work", tmp_path / "modules"
    for path in (programs, folder, modules):
        path.mkdir()
    for name, words in (("hlat", '-m hlat "$@"'), ("python", '"$@"')):
        (programs / name).write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} {words}\n")
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
    )
    assert done.returncode == 0, done.stdout[-6000:]


def _composed_only() -> list[tuple[str, str]]:
    return [
        (guide.stem, command)
        for guide in GUIDES
        for block in _blocks(guide, composed_only=True)
        for command in block.replace("\\\n", " ").splitlines()
        if not command.startswith("#")
    ]


@pytest.mark.parametrize(("guide", "command"), _composed_only())
def test_other_commands_compose(guide: str, command: str, compose) -> None:
    program, name, *words = shlex.split(command)
    assert program == "hlat"
    module = REPOSITORY / "hlat" / name
    assert module.is_dir() or module.with_suffix(".py").is_file() or name == "sweep"
    if name not in ("train", "sweep"):
        return
    overrides = [word for word in words if not re.match(r"\+?hydra[./]", word)]
    first_point = [word.split(",")[0] if "[" not in word else word for word in overrides]
    config = OmegaConf.to_object(compose(*first_point))
    problems = [problem for rule in VALIDATORS for problem in rule(config)]
    # These depend on the machine or the number of processes that the job has
    elsewhere = ("cannot be executed by this version", "needs a multiple of")
    assert not [p for p in problems if not any(words in p for words in elsewhere)], guide


def test_there_are_eight_guides() -> None:
    assert len(GUIDES) == 8
    assert {path.stem for path in GUIDES} >= SLOW
