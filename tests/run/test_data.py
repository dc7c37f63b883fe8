"""Data of whole runs: damaged text, data workers, and the ledger."""

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
def test_warn_once_of_bytes_that_are_not_utf8(
    runner, small, damaged, workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    mine = [word for word in small if not word.startswith("data.sources")]
    words = [*mine, *damaged, f"data.workers={workers}", "run.steps=3"]
    done = runner.run(*words, small=False)
    assert done.returncode == 0, done.stderr
    told = "data.sources.files: documents hold bytes that are not UTF-8; each reads as U+FFFD"
    written = done.stdout + done.stderr + "".join(capfd.readouterr())  # of workers as well
    assert written.count(told) == 1


def test_write_the_ledger_with_each_checkpoint_and_report_it(
    runner, without_figures, tmp_path
) -> None:
    options = ["run.name=x", "run.steps=7", "data.workers=2", "data.warn_epochs=0.01"]
    done = runner.run(*options)
    assert done.returncode == 0, done.stderr
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
