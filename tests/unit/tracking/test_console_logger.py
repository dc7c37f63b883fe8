"""Tests of progress lines and the progress bar."""

from pathlib import Path

from hlat.config.tracking import ConsoleStyle
from hlat.storage.progress_bar import print_line
from hlat.tracking.console_logger import ConsoleLogger
from hlat.tracking.metric_logger import RunInfo

ROW = {"loss": 2.5, "grad_norm": 0.5, "tokens_per_second": 1234.5, "step_seconds": 0.0}


def start_console(style, step, total):
    console = ConsoleLogger(style)
    console.start(RunInfo(Path(), "x", "", 1, step, total, {}, None))
    return console


def test_lines_contain_loss_throughput_and_time_left(capsys):
    console = start_console(ConsoleStyle.lines, step=0, total=50)
    for step in range(1, 51):
        console.log_metrics({"step": step, **ROW})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0] == "step 1/50  loss 2.5000  grad_norm 0.500  1,234 tokens/s"
    assert lines[-1].endswith("00:00 left")


def test_lines_contain_the_balance_of_experts(capsys):
    console = start_console(ConsoleStyle.lines, step=0, total=50)
    console.log_metrics({"step": 1, **ROW, "router_max_violation": 0.456})
    line = "step 1/50  loss 2.5000  grad_norm 0.500  1,234 tokens/s  max violation 0.46"
    assert capsys.readouterr().out.splitlines() == [line]


def test_bar_shows_loss_and_messages(capsys):
    console = start_console(ConsoleStyle.bar, step=1, total=3)
    for step in (2, 3):
        console.log_metrics({"step": step, **ROW})
    print_line("a message")
    console.finish({})
    printed = capsys.readouterr()
    assert "a message" in printed.out
    assert "3/3" in printed.err
    assert "loss 2.5000" in printed.err
