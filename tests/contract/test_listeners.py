"""Whoever shows a run shows the same run: what each of them wrote is read back and compared.

The libraries are the real ones; W&B's is offline, as it is without a key.
"""

import json
import math
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from hlat.tracking.listener import Beginning, event_scalars, scalars
from hlat.tracking.tracker import Tracker

NUMBERS = {"learning_rate": 0.1, "grad_norm": 1.0, "param_norm": 3.0}
BLOCK, HEADER = 32768, 7
"""Of LevelDB's log format, in which W&B writes."""


@pytest.fixture(autouse=True)
def without_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def wandb_records(folder: Path) -> Iterator[Any]:
    """Every record of the files that W&B's library wrote, in order; none may be torn."""
    from wandb.proto.wandb_internal_pb2 import Record

    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        content, at, parts = file.read_bytes(), HEADER, b""
        assert content[:4] == b":W&B"
        while at + HEADER <= len(content):
            if BLOCK - at % BLOCK < HEADER:
                at += BLOCK - at % BLOCK
            _, size, kind = struct.unpack_from("<IHB", content, at)
            part = content[at + HEADER : at + HEADER + size]
            parts, at = (part if kind in (1, 2) else parts + part), at + HEADER + size
            if kind in (1, 4):
                yield Record.FromString(parts)
        assert at == len(content)


def _key(item: Any) -> str:
    return item.key or ".".join(item.nested_key)


def _from_wandb(folder: Path) -> list[dict[str, float]]:
    rows = []
    for record in wandb_records(folder):
        if record.WhichOneof("record_type") == "history":
            row = {_key(item): json.loads(item.value_json) for item in record.history.item}
            rows.append({key: value for key, value in row.items() if not key.startswith("_")})
    return rows


def _from_tensorboard(folder: Path) -> list[dict[str, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    steps: dict[int, dict[str, float]] = {}
    for tag in read.Tags()["scalars"]:
        for scalar in read.Scalars(tag):
            steps.setdefault(scalar.step, {"step": scalar.step})[tag] = scalar.value
    return [steps[step] for step in sorted(steps)]


def _from_journal(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{"step": row["step"], **scalars(row)} for row in map(json.loads, lines)]


READERS = {"wandb": _from_wandb, "tensorboard": _from_tensorboard, None: _from_journal}


@pytest.fixture
def tracker_of(compose, tmp_path: Path) -> Callable[..., Tracker]:
    def opened(service: str | None, *overrides: str) -> Tracker:
        services = f"tracking.services=[{service or ''}]"
        composed = compose("run.name=x", "hardware=trn1_32xl", services, *overrides)
        config = OmegaConf.to_object(composed)
        return Tracker(tmp_path, config, config_yaml=OmegaConf.to_yaml(composed))

    return opened


def _log(tracker: Tracker, *steps: int, loss: float | None = None) -> None:
    for step in steps:
        value = 10.0 / step if loss is None else loss
        tracker.log(step, "base", loss=value, **NUMBERS)


@pytest.mark.parametrize("service", READERS, ids=str)
def test_rows_come_back(service: str | None, tracker_of, tmp_path: Path) -> None:
    tracker = tracker_of(service)
    tracker.begin(0)
    _log(tracker, 1, 2, 3)
    _log(tracker, 4, loss=math.nan)
    tracker.event("finish", 4)
    tracker.close()
    rows = [row for row in READERS[service](tmp_path) if "train/grad_norm" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    losses = [row.get("train/loss") for row in rows]
    assert losses == [pytest.approx(10.0), pytest.approx(5.0), pytest.approx(10 / 3), None]
    assert all(row["speed/tokens_per_second"] > 0 for row in rows)


@pytest.mark.parametrize("service", READERS, ids=str)
def test_an_attempt_goes_on_with_the_same_run(
    service: str | None, tracker_of, tmp_path: Path
) -> None:
    first = tracker_of(service)
    first.begin(0)
    _log(first, 1, 2, 3)
    first.event("interrupt", 3, signal="SIGTERM")
    first.close()
    second = tracker_of(service)
    second.begin(2)
    _log(second, 3, 4, loss=0.5)
    second.event("finish", 4)
    second.close()
    assert second.identity == first.identity
    rows = [row for row in READERS[service](tmp_path) if "train/loss" in row]
    # W&B takes nothing back: a step that is run again is there twice, in the order of time
    again = [1, 2, 3, 3, 4] if service == "wandb" else [1, 2, 3, 4]
    assert [row["step"] for row in rows] == again
    assert [row["train/loss"] for row in rows[-2:]] == [0.5, 0.5]


@pytest.mark.parametrize("service", READERS, ids=str)
def test_a_rewind_within_an_attempt(service: str | None, tracker_of, tmp_path: Path) -> None:
    tracker = tracker_of(service)
    tracker.begin(0)
    _log(tracker, 1, 2, 3)
    tracker.rewind(1)
    _log(tracker, 2, 3, loss=0.5)
    tracker.close()
    rows = [row for row in READERS[service](tmp_path) if "train/loss" in row]
    assert [row["step"] for row in rows][-2:] == [2, 3]
    assert [row["train/loss"] for row in rows][-2:] == [0.5, 0.5]
    assert len(rows) == (5 if service == "wandb" else 3)


@pytest.mark.parametrize("service", ["wandb", "tensorboard"])
def test_evaluations_and_sources_are_curves(service: str, tracker_of, tmp_path: Path) -> None:
    tracker = tracker_of(service)
    tracker.begin(0)
    bits = {"code": 1.5, "mean": 1.25}
    tracker.event("evaluate", 2, bits_per_byte=bits, loss=bits, seconds=0.1)
    read = {"tokens": 7, "documents": 1, "epochs": 0.5}
    stages = [{"name": n, "start": 0, "sources": {"code": read}} for n in ("base", "more")]
    tracker.event("ledger", 2, stages=stages)
    tracker.close()
    told: dict[str, float] = {}
    for row in READERS[service](tmp_path):
        told |= row
    assert told["heldout/bits_per_byte/code"] == 1.5
    assert told["heldout/loss/mean"] == 1.25
    assert told["data/tokens/code"] == 14
    assert told["step"] == 2


@pytest.mark.parametrize("service", [None, "wandb", "tensorboard"], ids=str)
def test_whatever_happens_to_the_folder_training_goes_on(
    service: str | None, tracker_of, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file in place of the service's folder refuses what a read-only folder does, to root too."""
    if service is not None:
        (tmp_path / service).write_text("in the way")
    tracker = tracker_of(service)
    tracker.begin(0)
    _log(tracker, *range(1, 40))
    tracker.close()
    assert [row["step"] for row in _from_journal(tmp_path)] == [*range(1, 40)]
    printed = capsys.readouterr().out
    assert printed.count("is left out from here on: FileExistsError") == (service is not None)


def test_wandb_is_told_what_its_users_expect(tracker_of, tmp_path: Path) -> None:
    words = ["group=lr", "job_type=ablation", "tags=[a,b]", "notes=why", "project=p", "entity=e"]
    tracker = tracker_of("wandb", *(f"tracking.wandb.{word}" for word in words))
    tracker.begin(0)
    _log(tracker, 1, 2)
    tracker.event("spike", 2, grad_norm=9.0)
    tracker.event("finish", 2)
    tracker.close()
    records = {r.WhichOneof("record_type"): r for r in wandb_records(tmp_path)}
    run = records["run"].run
    assert (run.run_group, run.job_type, [*run.tags], run.notes) == (
        "lr",
        "ablation",
        ["a", "b"],
        "why",
    )
    assert (run.project, run.entity, run.display_name) == ("p", "e", tmp_path.name)
    assert run.run_id == json.loads((tmp_path / "services.json").read_text())["wandb"]
    updates = [u for r in wandb_records(tmp_path) for u in (*r.config.update, *r.run.config.update)]
    config = {_key(update): json.loads(update.value_json) for update in updates}
    assert config["optimizer"]["lr"] == 0.003
    assert "code_revision" in config
    assert config["model"]["name"] == "tiny"
    axes = {
        r.metric.glob_name: r.metric.step_metric
        for r in wandb_records(tmp_path)
        if r.metric.glob_name
    }
    assert axes == {
        **dict.fromkeys(("train/*", "heldout/*", "eval/*"), "tokens"),
        **dict.fromkeys(("speed/*", "data/*"), "step"),
    }
    alerts = [
        r.alert.title for r in wandb_records(tmp_path) if r.WhichOneof("record_type") == "alert"
    ]
    assert alerts == [f"{tmp_path.name}: spike", f"{tmp_path.name}: finish"]
    summary = {
        _key(u): json.loads(u.value_json) for r in wandb_records(tmp_path) for u in r.summary.update
    }
    assert summary["best_loss"] == 5.0
    assert summary["spikes"] == 1


def test_services_hear_of_what_a_supervisor_wrote(tracker_of, tmp_path: Path) -> None:
    first = tracker_of("wandb")
    first.begin(0)
    _log(first, 1)
    first.close()
    event = {
        "event": "restart",
        "step": 1,
        "attempt": 1,
        "time": time.time(),
        "reason": "rank 1 hangs",
    }
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    second = tracker_of("wandb")
    second.begin(0)
    second.close()
    alerts = [r.alert for r in wandb_records(tmp_path) if r.WhichOneof("record_type") == "alert"]
    assert [alert.text for alert in alerts] == ["step 1: reason: rank 1 hangs"]


def test_no_library_is_imported_unless_it_is_asked_for(tracker_of) -> None:
    before = set(sys.modules)
    tracker = tracker_of(None)
    tracker.begin(0)
    tracker.close()
    assert not {name.partition(".")[0] for name in set(sys.modules) - before} & {
        "wandb",
        "tensorboard",
    }


def test_names_and_numbers_of_rows() -> None:
    row = {"step": 1, "tokens": 2, "loss": 1.0, "mfu": None, "phase": "base", "step_seconds": 2}
    assert scalars(row) == {"train/loss": 1.0, "speed/step_seconds": 2.0}
    assert event_scalars({"event": "spike", "step": 1}) == {}
    score = {
        "event": "score",
        "step": 1,
        "tokens": 9,
        "scores": {"cr": 50.0},
        "stderr": {"cr": 2.0},
    }
    assert event_scalars(score) == {"eval/cr": 50.0}


def test_the_console_hears_the_same(compose, capsys: pytest.CaptureFixture[str]) -> None:
    from hlat.config.tracking import Console as Style
    from hlat.tracking.console import Console

    console = Console(Style.lines)
    console.begin(Beginning(Path(), "x", "", 1, 0, 2, {}, None))
    for step in (1, 2):
        console.row({"step": step, "loss": math.nan, "grad_norm": 1.0, "tokens_per_second": 1.0})
    console.rewind(1)
    console.event({"event": "spike", "step": 2})
    console.finish({"step": 2.0})
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["1/2", "2/2"]
