"""Chosen steps and ranks are recorded, and a failure is an event."""

import contextlib
import csv
import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hlat.config.profiler import ProfilerConfig
from hlat.distributed.parallel_state import ParallelState
from hlat.engine.step_profiler import StepProfiler

SHAPES = {"Input Dims": [[8, 4], [4, 2]]}
ROWS = [
    {"ph": "X", "cat": "user_annotation", "name": "hlat::step", "ts": 0.0, "dur": 4000.0},
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1000.0, "dur": 2000.0, "args": SHAPES},
]


class Recording:
    """A recording that writes a small trace, or fails."""

    def __init__(self, error: Exception | None, rows: list[Any]) -> None:
        self.error, self.rows, self.is_stopped = error, rows, False

    def stop(self, memory_path: Path) -> None:
        self.is_stopped = True

    def write_trace(self, path: Path) -> None:
        assert self.is_stopped
        if self.error is not None:
            raise self.error
        path.write_bytes(gzip.compress(json.dumps({"traceEvents": self.rows}).encode()))


class Log:
    """Events and messages of the tracker, and pauses of the watchdog."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, dict[str, Any]]] = []
        self.messages: list[str] = []
        self.pauses = 0

    def log_event(self, event: str, step: int, **details: Any) -> None:
        self.events.append((event, step, details))

    def print_message(self, text: str) -> None:
        self.messages.append(text)

    @contextlib.contextmanager
    def pause(self):
        self.pauses += 1
        yield


def build(folder: Path, *, rank=0, error=None, start_error=None, rows=ROWS, **settings: Any):
    recordings: list[Recording] = []

    def start_recording() -> Recording:
        if start_error is not None:
            raise start_error
        recordings.append(Recording(error, rows))
        return recordings[-1]

    log = Log()
    engine = SimpleNamespace(
        parallel_state=ParallelState(rank=rank), start_recording=start_recording
    )
    config = SimpleNamespace(profiler=ProfilerConfig(**{"steps": [2, 4], **settings}))
    return StepProfiler(config, folder, engine, log), log, recordings


def run(profiler: StepProfiler, log: Log, num_steps: int = 5) -> None:
    for step in range(1, num_steps + 1):
        with profiler.profile(step, log.pause):
            pass


def test_chosen_steps_are_recorded(tmp_path) -> None:
    profiler, log, recordings = build(tmp_path)
    run(profiler, log)
    assert len(recordings) == log.pauses == 2
    assert [(event, step, row["ranks"]) for event, step, row in log.events] == [
        ("profile", 2, [0]),
        ("profile", 4, [0]),
    ]
    suffixes = (".json.gz", "_account.json", "_modules.csv", "_operators.csv")
    names = sorted(path.name for path in (tmp_path / "profiles").iterdir())
    assert names == [f"step_{step}_rank_0{suffix}" for step in (2, 4) for suffix in suffixes]
    account = json.loads((tmp_path / "profiles/step_4_rank_0_account.json").read_text())
    assert account["seconds"] == 0.004
    assert account["clock"] == "host"
    assert {name: value for name, value in account["classes"].items() if value} == {
        "matmuls": 0.002,
        "python": 0.002,
    }
    with (tmp_path / "profiles/step_4_rank_0_operators.csv").open() as file:
        rows = [*csv.DictReader(file)]
    assert {row["operator"]: row["shapes"] for row in rows} == {
        "hlat::step": "",
        "aten::mm": "[8, 4] [4, 2]",
    }


def test_other_ranks_record_nothing(tmp_path) -> None:
    profiler, log, recordings = build(tmp_path, rank=1)
    run(profiler, log)
    assert log.pauses == 2  # while rank 0 writes
    assert recordings == log.events == []
    assert not (tmp_path / "profiles").exists()


@pytest.mark.parametrize(
    "failure",
    [
        {"error": OSError(28, "No space left on device")},
        {"start_error": RuntimeError("Profiler is already enabled on this thread")},
        {"rows": ROWS[1:]},
    ],
    ids=["full disk", "in use", "truncated"],
)
def test_a_failure_is_an_event_and_training_continues(tmp_path, failure) -> None:
    profiler, log, _ = build(tmp_path, **failure)
    run(profiler, log)
    assert [(event, step) for event, step, _ in log.events] == [
        ("profile_failed", 2),
        ("profile_failed", 4),
    ]
    assert log.messages[0].startswith("WARNING: step 2 of rank 0 could not be profiled: ")
    assert log.messages[0].endswith("; training continues")


def test_a_directory_that_cannot_be_written_is_an_event(tmp_path) -> None:
    (tmp_path / "profiles").write_text("a file")
    profiler, log, recordings = build(tmp_path)
    run(profiler, log, 2)
    assert [event for event, *_ in log.events] == ["profile_failed"]
    assert recordings == []


def test_an_error_of_the_step_ends_the_recording(tmp_path) -> None:
    profiler, log, recordings = build(tmp_path)
    with pytest.raises(KeyError), profiler.profile(2, log.pause):
        raise KeyError("step")
    assert recordings[0].is_stopped
    assert log.events == []


def test_a_step_that_is_trained_again_replaces_its_files(tmp_path) -> None:
    profiler, log, _ = build(tmp_path)
    run(profiler, log)
    files = {path.name for path in (tmp_path / "profiles").iterdir()}
    profiler, log, recordings = build(tmp_path)
    run(profiler, log)
    assert len(recordings) == 2
    assert {path.name for path in (tmp_path / "profiles").iterdir()} == files
