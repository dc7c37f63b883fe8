"""Progress lines in a log without a terminal."""

from hlat.storage import progress_bar


def test_lines_are_printed_at_the_start_and_at_intervals(monkeypatch, capsys) -> None:
    now = [100.0]
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: now[0])
    bar = progress_bar.ProgressBar("preparing x", 10_000_000, 4_000_000)
    for seconds, done in ((30, 1_000_000), (31, 1_000_000), (10, 1_000_000)):
        now[0] += seconds
        bar.add(done)
    bar.close()
    first, second = capsys.readouterr().err.splitlines()
    assert first == "preparing x: 10.0MB, 4.00MB of them done"
    assert second == "preparing x: 6.00MB of 10.0MB, 32.8kB/s, 2 min left"
