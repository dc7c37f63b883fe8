"""Table of held-out results of a run page."""

from hlat.study.run_record import RunRecord
from hlat.study.summary_tables import HELDOUT_HEADERS, build_event_tables, build_heldout_table


def _row(step: int, code: float, news: float, **fields: object) -> dict[str, object]:
    bits = {"code": code, "news": news, "mean": (code + news) / 2}
    loss = {name: 2 * value for name, value in bits.items()}
    return {"event": "evaluate", "step": step, "loss": loss, "bits_per_byte": bits, **fields}


def test_results_of_the_same_text_and_of_all_text() -> None:
    first = _row(0, 3.0, 2.0)
    counts = {"documents": {"code": 1, "news": 32}, "tokens": {"code": 1000, "news": 65_536}}
    last = _row(
        9, 2.5, 2.25, stderr={"news": 0.125, "mean": 0.1}, loop=_row(9, 2.75, 2.5), **counts
    )
    record = RunRecord("x", [], [first, last], "", {}, 0)
    code, news, mean = build_heldout_table(record)
    assert code == ("code", "6.000", "5.500", "3.000", "2.750", "2.500", "n/a", "1", "1,000")
    assert news[0] == "news (worse than at the start)"
    assert news[1:] == ("4.000", "5.000", "2.000", "2.500", "2.250", "0.125", "32", "65,536")
    assert mean == ("mean", "5.000", "5.250", "2.500", "2.625", "2.375", "0.100", "n/a", "n/a")
    assert len(code) == 5 + len(HELDOUT_HEADERS)
    details = build_event_tables(record)[""][-1][-1]
    assert "documents" in details
    assert "loop" not in details
