"""The resume command has exactly the original arguments in any shell."""

import random
import shlex
import subprocess
from pathlib import Path

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
        assert found[1:] == ["-m", "hlat.train", *arguments]


def test_a_shell_executes_no_argument(tmp_path: Path) -> None:
    chance = random.Random(1)
    everything = [sample_arguments(chance) for _ in range(100)] + [
        ["a=$(touch x)", "`touch x`", ">x", "&x"]
    ]
    commands = [format_resume_command(arguments) for arguments in everything]
    script = "\n".join(f"printf '%s\\0' {command.partition(' ')[2]}" for command in commands)
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, check=True)
    expected = [word for arguments in everything for word in ("-m", "hlat.train", *arguments)]
    assert done.stdout.decode().split("\0")[:-1] == expected
    assert done.stderr == b""
    assert list(tmp_path.iterdir()) == []
