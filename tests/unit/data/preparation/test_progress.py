"""Without a terminal, a long job says how far it is once in a while."""

from hlat.data.preparation import progress


def test_a_line_at_the_beginning_and_then_at_intervals(monkeypatch, capsys) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    bar = progress.Progress("preparing x", 10_000_000, 4_000_000)
    for seconds, done in ((30, 1_000_000), (31, 2_000_000), (10, 3_000_000)):
        now[0] += seconds
        bar.set(done)
    bar.close()
    first, second = capsys.readouterr().err.splitlines()
    assert first == "preparing x: 10.0MB, 4.00MB of them done"
    assert second == "preparing x: 6.00MB of 10.0MB, 32.8kB/s, 2 min left"
