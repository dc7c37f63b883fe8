"""The resume command has exactly the original arguments in any shell."""

import random
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hlat.config.entry_point import format_resume_command

LETTERS = "ab=.,{}[]()<>|&;$`'\"\\*?!#~-% \t\né\u202e"


def sample_arguments(chance: random.Random) -> list[str]:
    lengths = [chance.randrange(1, 30) for _ in range(3)]
    return ["".join(chance.choices(LETTERS, k=length)) for length in lengths]


def test_a_thousand_overrides_are_quoted() -> None:
    chance = random.Random(0)
    for _ in range(1000):
        arguments = sample_arguments(chance)
        found = shlex.split(format_resume_command(arguments))
        assert found[found.index("train") + 1 :] == arguments


def test_a_shell_executes_no_argument(tmp_path: Path) -> None:
    chance = random.Random(1)
    everything = [sample_arguments(chance) for _ in range(100)] + [
        ["a=$(touch x)", "`touch x`", ">x", "&x"]
    ]
    commands = [
        format_resume_command(arguments).partition(" train ")[2] for arguments in everything
    ]
    script = "\n".join(f"printf '%s\\0' {command}" for command in commands)
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, check=True)
    expected = [word for arguments in everything for word in arguments]
    assert done.stdout.decode().split("\0")[:-1] == expected
    assert done.stderr == b""
    assert list(tmp_path.iterdir()) == []


def test_the_command_is_the_program_that_the_user_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use a link on the PATH, a program below the directory, and an interpreter without one."""
    programs = tmp_path / ".venv/bin"
    programs.mkdir(parents=True)
    (programs / "hlat").write_text("")
    (programs / "hlat").chmod(0o755)
    (tmp_path / "links").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "links"))
    assert format_resume_command(["a=1"]) == ".venv/bin/hlat train a=1"
    (tmp_path / "links/hlat").symlink_to(programs / "hlat")
    assert format_resume_command(["a=1"]) == "hlat train a=1"
    (programs / "hlat").unlink()
    assert format_resume_command(["a=1"]) == ".venv/bin/python -m hlat train a=1"
