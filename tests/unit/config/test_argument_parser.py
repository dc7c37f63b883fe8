"""Settings typed as overrides, mistakes, and exit codes when the reader closes the pipe."""

import errno
import os
import subprocess
import sys

import pytest

from hlat.config.argument_parser import (
    CommandLineParser,
    build_list_parser,
    parse_positive_int,
    run_command,
)
from hlat.config.config_errors import ExitCode


@pytest.fixture
def parser() -> CommandLineParser:
    return _build_parser()


def _build_parser(**options: bool) -> CommandLineParser:
    parser = CommandLineParser("copy", "Copy.", "examples:", **options)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("more", nargs="*")
    parser.add_argument("--steps", type=build_list_parser(parse_positive_int), metavar="A,B")
    parser.add_argument("--max-size", choices=["1", "2"])
    parser.add_argument("--json", action="store_true")
    return parser


@pytest.mark.parametrize(
    "argv",
    [
        ["r", "steps=1,2", "max_size=2", "json=true"],
        ["steps=[1,2]", "r", "max_size=2", "json=true"],
        ["r", "--steps", "1,2", "--max-size=2", "--json"],
    ],
)
def test_settings_are_typed_as_overrides_or_flags(parser, argv) -> None:
    arguments = parser.parse(argv)
    assert (arguments.run, arguments.steps, arguments.max_size) == ("r", [1, 2], "2")
    assert arguments.json
    assert not parser.parse(["r", "json=false"]).json


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["r", "stps=1"], "stps= is not a setting of this command; did you mean steps=?"),
        (["r", "--stps", "1"], "unrecognized arguments: --stps 1; did you mean steps=?"),
        (
            ["r", "zzz=1"],
            "zzz= is not a setting of this command; settings: steps=, max_size=, json=",
        ),
        (["r", "steps=0"], "steps: 0 is not a whole number of 1 or more"),
        (["r", "json=maybe"], "json=maybe: use json=true or json=false"),
        (
            ["r", "steps=1", "steps=2"],
            "steps is set 2 times: steps=1 and steps=2; keep one of them",
        ),
        ([], "the following arguments are required: RUN"),
    ],
)
def test_mistakes_exit_with_2_and_a_remedy(parser, argv, message, capsys) -> None:
    with pytest.raises(SystemExit) as exited:
        parser.parse(argv)
    assert exited.value.code == 2
    assert message in capsys.readouterr().err


def test_overrides_pass_through_where_the_command_takes_them() -> None:
    arguments = _build_parser(takes_overrides=True).parse(["r", "optimizer.lr=1", "model=7b"])
    assert arguments.more == ["optimizer.lr=1", "model=7b"]


def test_a_path_may_contain_an_equals_sign(parser, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=1").mkdir()
    assert parser.parse(["lr=1"]).run == "lr=1"


def test_help_page(parser, capsys) -> None:
    with pytest.raises(SystemExit):
        parser.parse(["--help"])
    page = capsys.readouterr().out
    assert page.startswith("usage: hlat copy RUN [more ...] [key=value ...]")
    assert "steps=A,B" in page
    assert "max_size=1|2" in page
    assert "json=true" in page
    assert "--steps" not in page


PROGRAM = """
import sys
from hlat.config.argument_parser import run_and_exit

def main():
    {body}

run_and_exit(main)
"""


def run(body, read):
    """Return exit code, stderr and bytes read of a program; the reader may have closed the pipe."""
    out, into = os.pipe()
    if not read:
        os.close(out)
    command = [sys.executable, "-c", PROGRAM.format(body=body)]
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    with subprocess.Popen(
        command, env=buffered, stdout=into, stderr=subprocess.PIPE, text=True
    ) as process:
        os.close(into)
        received = b""
        while read and (part := os.read(out, 4096)):
            received += part
        _, stderr = process.communicate()
    if read:
        os.close(out)
    return process.returncode, stderr, len(received)


@pytest.mark.parametrize(
    ("body", "with_reader", "without"),
    [
        ("print('x' * 99)", 0, 0),
        ("print('x' * 99); return 2", 2, 2),
        ("print('x' * 99); sys.exit(3)", 3, 3),
        ("print('x' * 99_999, flush=True)", 0, 141),
    ],
)
def test_exit_codes_with_and_without_a_reader(body, with_reader, without):
    code, stderr, received = run(body, read=True)
    assert (code, stderr) == (with_reader, "")
    assert received >= 100
    assert run(body, read=False) == (without, "", 0)


@pytest.mark.parametrize(
    ("number", "code", "remedy"),
    [
        (errno.ENOTDIR, ExitCode.CONFIGURATION, "; specify a path that you can read and write"),
        (errno.EACCES, ExitCode.CONFIGURATION, "; specify a path that you can read and write"),
        (errno.ENOSPC, ExitCode.FAILED, ""),
    ],
)
def test_os_errors(capsys, number: int, code: ExitCode, remedy: str) -> None:
    def fail() -> int:
        raise OSError(number, os.strerror(number), "a\x1bb")

    assert run_command(fail, "output=x cannot be written") == code
    reason = os.strerror(number)
    expected = f"hlat: output=x cannot be written: a\\x1bb: {reason}{remedy}\n"
    assert capsys.readouterr().err == expected
