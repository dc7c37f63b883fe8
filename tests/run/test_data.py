"""What whole runs make of data: damage told and survived, workers, the ledger."""

import json
import os
from pathlib import Path

import pyarrow as pa
import pytest

from hlat.report.report_writer import write_report


@pytest.fixture
def damaged(tmp_path: Path) -> list[str]:
    """Overrides that read text of which a part is not UTF-8."""
    texts = [
        f"document {i} of some length, with a bad byte: ".encode() + b"\xff" for i in range(60)
    ]
    table = pa.table({"text": pa.array(texts, pa.binary()).view(pa.string())})
    folder = tmp_path / "damaged"
    folder.mkdir()
    with (
        pa.OSFile(str(folder / "x.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table)
    return ["data=files", f"data.sources.files.paths=[{folder}]"]


@pytest.mark.parametrize("workers", [0, 1])
def test_bytes_that_are_not_utf8_are_told_and_do_not_end_the_run(
    hlat, small, damaged, workers: int
) -> None:
    mine = [word for word in small if not word.startswith("data.sources")]
    done = hlat("train", *mine, *damaged, f"data.workers={workers}", "run.steps=3")
    assert done.returncode == 0
    told = "data.sources.files: documents hold bytes that are not UTF-8; each reads as U+FFFD"
    assert (done.stdout + done.stderr).count(told) == 1


def test_the_ledger_is_written_with_each_save_and_shown(hlat, small, tmp_path) -> None:
    options = ["run.name=x", "run.steps=7", "data.workers=2", "data.warn_epochs=0.01"]
    done = hlat("train", *small, *options)
    assert done.returncode == 0
    assert "WARNING: data.sources.code has been read 0." in done.stdout
    events = (tmp_path / "runs/x/events.jsonl").read_text()
    rows = [json.loads(line) for line in events.splitlines()]
    ledgers = [row for row in rows if row["event"] == "ledger"]
    assert [row["step"] for row in ledgers] == [5, 7]
    (stage,) = ledgers[-1]["stages"]
    assert sum(entry["tokens"] for entry in stage["sources"].values()) == 7 * 8 * 64
    page = write_report(tmp_path / "runs/x").read_text()
    assert "<h2>Data</h2>" in page
    assert f'<td class="number">{stage["sources"]["code"]["tokens"]:,}</td>' in page
    assert os.listdir(tmp_path / "runs/x/figures")
