"""Tests of the metric loggers: their files are read back and compared with metrics.jsonl.

The libraries are not mocked; W&B runs offline, as without an API key.
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

from hlat.tracking.metric_logger import RunInfo, extract_event_scalars, extract_scalars
from hlat.tracking.tracker import Tracker

NUMBERS = {"learning_rate": 0.1, "grad_norm": 1.0, "param_norm": 3.0}
BLOCK, HEADER = 32768, 7
"""Sizes in bytes of LevelDB's log format, which W&B uses."""


@pytest.fixture(autouse=True)
def without_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def wandb_records(folder: Path) -> Iterator[Any]:
    """Yield all records of W&B's files in order; fail on a truncated record."""
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
    """Return the rows that W&B's server would have: it removes those after a branch point."""
    rows: list[dict[str, float]] = []
    for record in wandb_records(folder):
        kind = record.WhichOneof("record_type")
        if kind == "run" and record.run.branch_point.run:
            rows = [row for row in rows if row["_step"] <= record.run.branch_point.value]
        elif kind == "history":
            row = {_key(item): json.loads(item.value_json) for item in record.history.item}
            row["_step"] = record.history.step.num
            assert not rows or row["_step"] > rows[-1]["_step"], "W&B ignores such a row"
            rows.append(row)
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]


def _from_tensorboard(folder: Path) -> list[dict[str, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    steps: dict[int, dict[str, float]] = {}
    for tag in read.Tags()["scalars"]:
        for scalar in read.Scalars(tag):
            steps.setdefault(scalar.step, {"step": scalar.step})[tag] = scalar.value
    return [steps[step] for step in sorted(steps)]


def _from_jsonl(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{"step": row["step"], **extract_scalars(row)} for row in map(json.loads, lines)]


READERS = {"wandb": _from_wandb, "tensorboard": _from_tensorboard, None: _from_jsonl}


@pytest.fixture
def tracker_of(compose, tmp_path: Path) -> Callable[..., Tracker]:
    def build(service: str | None, *overrides: str) -> Tracker:
        services = f"tracking.services=[{service or ''}]"
        composed = compose("run.name=x", "hardware=trn1_32xl", services, *overrides)
        config = OmegaConf.to_object(composed)
        return Tracker(tmp_path, config, config_yaml=OmegaConf.to_yaml(composed))

    return build


def _log(tracker: Tracker, *steps: int, loss: float | None = None) -> None:
    for step in steps:
        value = 10.0 / step if loss is None else loss
        tracker.log_metrics(step, "base", loss=value, **NUMBERS)


@pytest.mark.parametrize("service", READERS, ids=str)
@pytest.mark.slow_after(1)
def test_rows_can_be_read_back(service: str | None, tracker_of, tmp_path: Path) -> None:
    tracker = tracker_of(service)
    tracker.start_attempt(0)
    _log(tracker, 1, 2, 3)
    _log(tracker, 4, loss=math.nan)
    tracker.log_event("finish", 4)
    tracker.close()
    rows = [row for row in READERS[service](tmp_path) if "train/grad_norm" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    losses = [row.get("train/loss") for row in rows]
    assert losses == [pytest.approx(10.0), pytest.approx(5.0), pytest.approx(10 / 3), None]
    assert all(row["perf/tokens_per_second"] > 0 for row in rows)


@pytest.mark.parametrize("service", READERS, ids=str)
@pytest.mark.slow_after(1)
def test_second_attempt_resumes_the_same_run(
    service: str | None, tracker_of, tmp_path: Path
) -> None:
    first = tracker_of(service)
    first.start_attempt(0)
    _log(first, 1, 2, 3)
    first.log_event("interrupt", 3, signal="SIGTERM")
    first.close()
    second = tracker_of(service)
    second.start_attempt(2)
    _log(second, 3, 4, loss=0.5)
    second.log_event("finish", 4)
    second.close()
    assert second.service_run_ids == first.service_run_ids
    rows = [row for row in READERS[service](tmp_path) if "train/loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["train/loss"] for row in rows[-2:]] == [0.5, 0.5]


@pytest.mark.parametrize("service", READERS, ids=str)
def test_a_rewind_within_an_attempt(service: str | None, tracker_of, tmp_path: Path) -> None:
    tracker = tracker_of(service)
    tracker.start_attempt(0)
    _log(tracker, 1, 2, 3)
    tracker.rewind(1)
    _log(tracker, 2, 3, loss=0.5)
    tracker.close()
    rows = [row for row in READERS[service](tmp_path) if "train/loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["train/loss"] for row in rows][-2:] == [0.5, 0.5]


@pytest.mark.slow
def test_wandb_keeps_the_rows_of_a_clean_stop(tracker_of, tmp_path: Path) -> None:
    """Log a score of an earlier step in a row of its own; W&B ignores rows before its last one."""
    for steps, start in (((1, 2), 0), ((3, 4), 2)):
        tracker = tracker_of("wandb")
        tracker.start_attempt(start)
        tracker.log_event("evaluate", start, bits_per_byte={"mean": 1.0}, loss={}, seconds=0.1)
        _log(tracker, *steps)
        tracker.log_event("score", 1, scores={"arc_easy": 0.25})
        tracker.close()
    runs = [
        record.run
        for record in wandb_records(tmp_path)
        if record.WhichOneof("record_type") == "run"
    ]
    assert not any(run.branch_point.run for run in runs)
    rows = _from_wandb(tmp_path)
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4]
    assert [row["step"] for row in rows if "eval/mean/bits_per_byte" in row] == [0, 2]
    assert {row["step"] for row in rows if "eval/arc_easy/score" in row} == {1}


@pytest.mark.slow
def test_training_continues_if_wandb_cannot_rewind(
    tracker_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import wandb

    init = wandb.init

    def refuse_rewind(**arguments: Any) -> Any:
        if "resume_from" in arguments:
            raise wandb.errors.CommError("rewind is not enabled")
        return init(**arguments)

    monkeypatch.setattr(wandb, "init", refuse_rewind)
    first = tracker_of("wandb")
    first.start_attempt(0)
    _log(first, 1, 2, 3)
    first.close()
    second = tracker_of("wandb")
    second.start_attempt(2)
    _log(second, 3)
    second.close()
    assert "W&B cannot rewind the run to step 2 (rewind is not enabled)" in capsys.readouterr().out
    assert [
        record.run.run_id
        for record in wandb_records(tmp_path)
        if record.WhichOneof("record_type") == "run"
    ]


@pytest.mark.parametrize("service", ["wandb", "tensorboard"])
def test_evaluations_and_sources_are_curves(service: str, tracker_of, tmp_path: Path) -> None:
    tracker = tracker_of(service)
    tracker.start_attempt(0)
    bits = {"code": 1.5, "mean": 1.25}
    tracker.log_event("evaluate", 2, bits_per_byte=bits, loss=bits, seconds=0.1)
    counts = {"tokens": 7, "documents": 1, "epochs": 0.5}
    stages = [{"name": n, "start": 0, "sources": {"code": counts}} for n in ("base", "more")]
    tracker.log_event("ledger", 2, stages=stages)
    tracker.close()
    scalars: dict[str, float] = {}
    for row in READERS[service](tmp_path):
        scalars |= row
    assert scalars["eval/code/bits_per_byte"] == 1.5
    assert scalars["eval/mean/loss"] == 1.25
    assert scalars["data/tokens/code"] == 14
    assert scalars["step"] == 2


def _log_samples(tracker: Tracker) -> None:
    tracker.start_attempt(0)
    for step in (1, 2):
        samples = [{"prompt": "a\nb", "text": f"c <d>{step}"}, {"prompt": "", "text": ""}]
        tracker.log_event("samples", step, texts=samples, seconds=0.1)
    tracker.close()


def test_samples_are_a_table_of_wandb(tracker_of, tmp_path: Path) -> None:
    _log_samples(tracker_of("wandb"))
    tables = [
        json.loads(path.read_text())
        for path in sorted(tmp_path.glob("wandb/offline-run-*/files/media/table/*.json"))
    ]
    assert {tuple(table["columns"]) for table in tables} == {("step", "prompt", "text")}
    rows = sorted(row for table in tables for row in table["data"])
    assert rows == [[1, "", ""], [1, "a\nb", "c <d>1"], [2, "", ""], [2, "a\nb", "c <d>2"]]


def test_samples_are_text_summaries_of_tensorboard(tracker_of, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _log_samples(tracker_of("tensorboard"))
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    events = read.Tensors("samples")
    strings = [event.tensor_proto.string_val[0].decode() for event in events]
    assert [event.step for event in events] == [1, 2]
    assert "    a\n    b\n" in strings[1]
    assert "    c <d>2\n" in strings[1]


@pytest.mark.parametrize("service", [None, "wandb", "tensorboard"], ids=str)
def test_training_continues_if_the_directory_is_not_writable(
    service: str | None, tracker_of, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Use a file in place of the directory, as root can write to read-only directories."""
    if service is not None:
        (tmp_path / service).write_text("in the way")
    tracker = tracker_of(service)
    tracker.start_attempt(0)
    _log(tracker, *range(1, 40))
    tracker.close()
    assert [row["step"] for row in _from_jsonl(tmp_path)] == [*range(1, 40)]
    printed = capsys.readouterr().out
    assert printed.count("is disabled after FileExistsError") == (service is not None)


def test_wandb_run_has_settings_config_axes_and_alerts(tracker_of, tmp_path: Path) -> None:
    settings = ["group=lr", "job_type=ablation", "tags=[a,b]", "notes=why", "project=p", "entity=e"]
    tracker = tracker_of("wandb", *(f"tracking.wandb.{setting}" for setting in settings))
    tracker.start_attempt(0)
    _log(tracker, 1, 2)
    tracker.log_event("spike", 1, grad_norm=1.3, average=0.7)
    tracker.log_event("spike", 2, grad_norm=9.0, average=0.7)
    tracker.log_event("finish", 2)
    tracker.close()
    records = {r.WhichOneof("record_type"): r for r in wandb_records(tmp_path)}
    run = records["run"].run
    assert (run.run_group, run.job_type, run.notes) == ("lr", "ablation", "why")
    assert [*run.tags] == ["a", "b", "tiny", "adamw", "fp32", "cosine", "trn1.32xlarge"]
    assert (run.project, run.entity, run.display_name) == ("p", "e", tmp_path.name)
    assert run.run_id == json.loads((tmp_path / "services.json").read_text())["wandb"]
    updates = [u for r in wandb_records(tmp_path) for u in (*r.config.update, *r.run.config.update)]
    config = {_key(update): json.loads(update.value_json) for update in updates}
    assert config["optimizer"]["lr"] == 0.002
    assert "code_revision" in config
    assert config["model"]["name"] == "tiny"
    axes = {
        r.metric.glob_name: r.metric.step_metric
        for r in wandb_records(tmp_path)
        if r.metric.glob_name
    }
    assert axes == {
        **dict.fromkeys(("train/*", "eval/*", "router/*"), "tokens"),
        **dict.fromkeys(("perf/*", "data/*"), "step"),
    }
    alerts = [
        r.alert.title for r in wandb_records(tmp_path) if r.WhichOneof("record_type") == "alert"
    ]
    assert alerts == [f"{tmp_path.name}: spike", f"{tmp_path.name}: finish"]
    summary = {
        _key(u): json.loads(u.value_json) for r in wandb_records(tmp_path) for u in r.summary.update
    }
    assert summary["best_loss"] == 5.0
    assert summary["spikes"] == 2
    assert summary["state"] == "finish"


def test_a_generated_name_is_followed_by_the_overrides(compose, tmp_path: Path) -> None:
    run_dir = tmp_path / "tiny-0123abcd"
    run_dir.mkdir()
    config = OmegaConf.to_object(compose("tracking.services=[wandb]"))
    tracker = Tracker(run_dir, config, overrides=["optimizer.lr=0.1", "tracking=wandb"])
    tracker.start_attempt(0)
    tracker.close()
    names = {r.run.display_name for r in wandb_records(run_dir) if r.HasField("run")}
    assert names == {"tiny-0123abcd: lr=0.1"}


@pytest.mark.slow  # W&B's service starts for each mode
@pytest.mark.parametrize("mode", ["null", "reference", "upload"])
def test_checkpoints_are_artifacts_if_configured(mode: str, tracker_of, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints/step_00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights.bin").write_bytes(b"weights")
    tracker = tracker_of("wandb", f"tracking.wandb.checkpoints={mode}")
    tracker.start_attempt(0)
    _log(tracker, 1, 2)
    for path in (tmp_path / "checkpoints/pruned", checkpoint):
        tracker.log_event("checkpoint", 2, path=str(path), seconds=0.1, stall_seconds=0.1)
    tracker.close()
    artifacts = [
        record.request.log_artifact.artifact
        for record in wandb_records(tmp_path)
        if record.request.WhichOneof("request_type") == "log_artifact"
    ] + [r.artifact for r in wandb_records(tmp_path) if r.WhichOneof("record_type") == "artifact"]
    if mode == "null":
        assert artifacts == []
        return
    (artifact,) = artifacts
    assert artifact.type == "model"
    assert {"latest", "step-2"} <= {*artifact.aliases}
    assert json.loads(artifact.metadata)["path"] == str(checkpoint)
    (entry,) = artifact.manifest.contents
    assert entry.path == "weights.bin"
    expected = f"{checkpoint.as_uri()}/weights.bin" if mode == "reference" else ""
    assert entry.ref == expected


@pytest.mark.slow
def test_supervisor_events_are_sent_by_the_next_attempt(tracker_of, tmp_path: Path) -> None:
    first = tracker_of("wandb")
    first.start_attempt(0)
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
    second.start_attempt(0)
    second.close()
    alerts = [r.alert for r in wandb_records(tmp_path) if r.WhichOneof("record_type") == "alert"]
    assert [alert.text for alert in alerts] == ["step 1: reason: rank 1 hangs"]


def test_libraries_are_imported_only_if_configured(tracker_of) -> None:
    before = set(sys.modules)
    tracker = tracker_of(None)
    tracker.start_attempt(0)
    tracker.close()
    assert not {name.partition(".")[0] for name in set(sys.modules) - before} & {
        "wandb",
        "tensorboard",
    }


def test_scalar_names() -> None:
    row = {"step": 1, "tokens": 2, "loss": 1.0, "mfu": None, "phase": "base", "step_seconds": 2}
    assert extract_scalars(row) == {"train/loss": 1.0, "perf/step_seconds": 2.0}
    router = {"router_entropy": 3.0, "router_max_violation": 0.5, "router_dropped": 0.25}
    expected = {f"train/{key}": value for key, value in router.items()}
    layers = {"router_violations": [0.5, None], "router_loads": [[1.5, 0.5], None]}
    expected["router/violation/layer_0"] = 0.5
    expected |= {"router/load/layer_0/expert_0": 1.5, "router/load/layer_0/expert_1": 0.5}
    assert extract_scalars({"step": 1, **router, **layers}) == expected
    assert extract_event_scalars({"event": "spike", "step": 1}) == {}
    score = {
        "event": "score",
        "step": 1,
        "tokens": 9,
        "scores": {"cr": 50.0},
        "stderr": {"cr": 2.0},
    }
    assert extract_event_scalars(score) == {"eval/cr/score": 50.0}


def test_console_lines(compose, capsys: pytest.CaptureFixture[str]) -> None:
    from hlat.config.tracking import ConsoleStyle
    from hlat.tracking.console_logger import ConsoleLogger

    console = ConsoleLogger(ConsoleStyle.lines)
    console.start(RunInfo(Path(), "x", "", 1, 0, 2, {}, None))
    for step in (1, 2):
        console.log_metrics(
            {
                "step": step,
                "loss": math.nan,
                "grad_norm": 1.0,
                "tokens_per_second": 1.0,
                "step_seconds": 1.0,
            }
        )
    console.rewind(1)
    console.log_event({"event": "spike", "step": 2})
    console.finish({"step": 2.0})
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["1/2", "2/2"]
