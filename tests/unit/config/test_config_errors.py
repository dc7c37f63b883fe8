"""Control characters from foreign files in messages and tables."""

import pytest

from hlat.config.config_errors import ConfigError
from hlat.storage.progress_bar import print_line
from hlat.tracking.text_format import format_table

FOREIGN = "\x1b]0;title\x07\x1b[2J\r\x9b1A\u202eevil\ud800 é 漢"
ESCAPED = r"\x1b]0;title\x07\x1b[2J\r\x9b1A\u202eevil\ud800 é 漢"


def test_errors_escape_control_characters() -> None:
    error = ConfigError(f"first {FOREIGN}", "second\tline\nof text")
    assert error.problems == (f"first {ESCAPED}", "second\tline\nof text")
    assert str(error) == f"first {ESCAPED}\nsecond\tline\nof text"


def test_tables_and_lines_escape_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    lines = format_table(["name", "x"], [[FOREIGN, "1"]])
    assert [line.split() for line in lines] == [["name", "x"], [*ESCAPED.split(), "1"]]
    print_line(FOREIGN)
    assert capsys.readouterr().out == f"{ESCAPED}\n"
