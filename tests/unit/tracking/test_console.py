"""What a log file shows: the first line, the last, and one now and then."""

from pathlib import Path

from hlat.config.tracking import Console as Style
from hlat.tracking.console import Console, _clock
from hlat.tracking.listener import Beginning

ROW = {"loss": 2.5, "grad_norm": 0.5, "tokens_per_second": 1234.5}


def opened(style, step, total):
    console = Console(style)
    console.begin(Beginning(Path(), "x", "", 1, step, total, {}, None))
    return console


def test_lines_are_few_and_say_what_matters(capsys):
    console = opened(Style.lines, step=0, total=50)
    for step in range(1, 51):
        console.row({"step": step, **ROW})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("step 1/50  loss 2.5000  grad_norm 0.500  1,234 tokens/s  ")
    assert lines[-1].endswith("0:00 left")


def test_a_bar_shows_the_same(capsys):
    console = opened(Style.bar, step=1, total=3)
    for step in (2, 3):
        console.row({"step": step, **ROW})
    console.say("a sentence")
    console.finish({})
    printed = capsys.readouterr()
    assert "a sentence" in printed.out
    assert "3/3" in printed.err
    assert "loss 2.5000" in printed.err


def test_clock():
    assert [_clock(seconds) for seconds in (5, 65, 3723)] == ["0:05", "1:05", "1:02:03"]
