"""Data of whole runs: damaged text, data workers, changes during a run, and the ledger."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from hlat.recovery.fault_tolerance import FaultTolerance
from hlat.recovery.rollback_policy import RollbackPolicy
from hlat.report.report_writer import write_report


@pytest.fixture
def damaged(tmp_path: Path) -> list[str]:
    """Return overrides that read text with invalid UTF-8."""
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
@pytest.mark.slow_after(1)
def test_warn_once_of_bytes_that_are_not_utf8(
    runner, small, damaged, workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    mine = [argument for argument in small if not argument.startswith("data.sources")]
    arguments = [*mine, *damaged, f"data.workers={workers}", "run.steps=3"]
    done = runner.run(*arguments, small=False)
    assert done.returncode == 0, done.stderr
    told = "data.sources.files: documents hold bytes that are not UTF-8; each reads as U+FFFD"
    written = done.stdout + done.stderr + "".join(capfd.readouterr())  # of workers as well
    assert written.count(told) == 1


def change_file(path: Path, change: str) -> None:
    """Change the content of a file as a copy, a failing disk or a mistyped command does."""
    status, content = path.stat(), path.read_bytes()
    if change == "truncated":
        os.truncate(path, len(content) // 4)
    elif change == "zeroed in place":
        with path.open("r+b") as file:
            file.write(bytes(len(content)))
    else:
        path.unlink()
        path.write_bytes(bytes(len(content)))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.fixture
def run_with_change(runner, corpus: Path, monkeypatch) -> Callable[..., Any]:
    """Return a function that runs the small run and changes a data file after a step."""

    def run(change: str, step: int, *overrides: str) -> Any:
        root = shutil.copytree(corpus, runner.folder / "corpus")
        finish_step = FaultTolerance.step
        steps = iter(range(1, 99))

        def change_and_finish_step(self: FaultTolerance) -> bool:
            if next(steps) == step:
                change_file(root / "prose.arrow", change)
            return finish_step(self)

        monkeypatch.setattr(FaultTolerance, "step", change_and_finish_step)
        return runner.run(f"data.root={root}", "run.name=x", *overrides)

    return run


@pytest.mark.parametrize(
    ("change", "workers"),
    [
        ("truncated", 0),
        pytest.param("truncated", 1, marks=pytest.mark.slow),  # starts a process
        ("zeroed in place", 0),
        ("replaced with the same size and time", 0),
    ],
)
@pytest.mark.slow_after(1)
def test_end_with_the_name_of_a_file_that_changes_under_a_run(
    run_with_change, runner, change: str, workers: int
) -> None:
    """Reading a mapped page behind the end of a truncated file would kill the process."""
    done = run_with_change(change, 7, f"data.workers={workers}")
    path = runner.folder / "corpus/prose.arrow"
    assert done.returncode == 2, done.stderr
    assert f"{path} has changed since the run opened it (" in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(runner.folder / "runs/x/checkpoints") == ["step_00000005"]


@pytest.mark.slow
def test_compare_the_files_before_a_rollback(run_with_change, runner, monkeypatch) -> None:
    monkeypatch.setattr(RollbackPolicy, "has_diverged", lambda self, step, _: step == 8)
    done = run_with_change("replaced with the same size and time", 7)
    assert done.returncode == 2, done.stderr
    assert "corpus/prose.arrow has changed since the run opened it (its bytes from" in done.stderr
    assert not any(row["event"] == "rollback" for row in runner.rows("x", "events.jsonl"))


@pytest.mark.slow
def test_save_the_last_state_before_a_changed_file_is_an_error(run_with_change, runner) -> None:
    done = run_with_change("truncated", 7, "run.steps=7")
    assert done.returncode == 2, done.stderr
    assert "corpus/prose.arrow has changed since the run opened it (it has" in done.stderr
    assert (runner.folder / "runs/x/checkpoints/step_00000007/COMMITTED").exists()


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
