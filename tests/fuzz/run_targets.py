"""Readers of run directories: metrics, events, configuration, provenance, scores, sweeps."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from omegaconf import OmegaConf

from hlat.checkpoint.rollback_log import (
    ROLLBACKS_FILE,
    Rollback,
    load_rollbacks,
    save_rollbacks,
)
from hlat.config.compose import compose_config
from hlat.config.recorded_config import load_recorded_settings, parse_run_config
from hlat.config.resolve import resolve_config
from hlat.config.run import Config
from hlat.distributed.object_group import SingleRankGroup
from hlat.evaluate import evaluation_results, humaneval
from hlat.figures.report_figure import ReportFigure
from hlat.report import evaluation_items, score_tables
from hlat.report.report_writer import render_report
from hlat.study import run_comparison
from hlat.study.index_file import INDEX_NAME, load_run_list
from hlat.study.run_record import load_run_record
from hlat.tracking import sweep_log
from hlat.tracking.tracker import Tracker
from tests.fuzz.data_targets import serialize_rows
from tests.fuzz.fuzzer import Target
from tests.fuzz.mutations import either, mutate_bytes, mutate_json, mutate_rows, mutate_text
from tests.unit.report.item_files import write_model

METRICS, EVENTS = "metrics.jsonl", "events.jsonl"
ROW = {
    "step": 1,
    "tokens": 4096,
    "loss": 2.5,
    "grad_norm": 1.5,
    "param_norm": 60.0,
    "learning_rate": 3e-4,
    "tokens_per_second": 8192.0,
    "step_seconds": 0.5,
    "data_wait_seconds": 0.005,
    "mfu": 0.4,
    "cost_usd": 0.1,
    "phase": "main",
    "attempt": 1,
    "time": 1000.5,
    "memory_bytes": 1e6,
}
_METRICS = dict.fromkeys(("learning_rate", "loss", "grad_norm", "param_norm", "memory_bytes"), 1.0)
_EVENT = {"attempt": 1, "time": 1000.0, "step": 0}
_SHARES = [{"name": "main", "tokens": 8, "sources": {"a": {"tokens": 8, "epochs": 0.5}}}]
EVENT_ROWS = [
    _EVENT | {"event": "start", "began": 990.0},
    _EVENT | {"event": "ready"},
    _EVENT | {"event": "evaluate", "seconds": 0.5, "loss": {"a": 2.0}, "bits_per_byte": {"a": 1.5}},
    _EVENT | {"event": "checkpoint", "step": 2, "stall_seconds": 0.1, "path": "x"},
    _EVENT | {"event": "ledger", "step": 2, "stages": _SHARES},
    _EVENT | {"event": "phase", "step": 2, "name": "upsample"},
    _EVENT | {"event": "spike", "step": 2, "grad_norm": 9.0},
    _EVENT | {"event": "rollback", "step": 3, "left_out": [1, 2], "to": 1, "reason": "x"},
    _EVENT | {"event": "rewind", "step": 1, "lost_steps": 1, "lost_seconds": 0.5},
    _EVENT | {"event": "score", "step": 2, "scores": {"mmlu": 25.0}, "stderr": {"mmlu": 1.0}},
    _EVENT | {"event": "resume", "step": 2, "attempt": 2, "refused": ["x"], "lost_steps": 1},
    _EVENT | {"event": "finish", "step": 3, "attempt": 2},
]


def _build_run_file(name: str) -> Callable[[Path], list[bytes]]:
    """Return a function that writes a run directory, and returns the content of one file."""

    def set_up(directory: Path) -> list[bytes]:
        rows = [ROW | {"step": step, "time": 1000.0 + step} for step in range(1, 6)]
        contents = {
            METRICS: serialize_rows(rows),
            EVENTS: serialize_rows(EVENT_ROWS),
            "provenance.json": json.dumps({"git": {"revision": "x"}, "hosts": ["a"]}).encode(),
        }
        if name not in contents:  # the comparison with the plan is most of the time
            contents[name] = OmegaConf.to_yaml(_compose()).encode()
        (directory / "seed").mkdir()
        for file, content in contents.items():
            (directory / "seed" / file).write_bytes(content)
        return [contents[name]]

    return set_up


def _compose() -> object:
    return compose_config(["run.name=x"])


def _read_run(name: str) -> Callable[[Path, bytes], object]:
    """Return a function that writes the page of a run, and resumes its logs."""

    def read(directory: Path, content: bytes) -> object:
        run_dir = directory / "x"
        shutil.rmtree(run_dir, ignore_errors=True)
        shutil.copytree(directory / "seed", run_dir)
        (run_dir / name).write_bytes(content)
        record = load_run_record(run_dir)
        with mock.patch.object(ReportFigure, "render_svg", return_value="<svg></svg>"):
            page = render_report(record)
        run_comparison.build_comparison_table([record, record])
        run_comparison.build_seed_table([record, record])
        _resume(run_dir)
        return page

    return read


def _resume(run_dir: Path) -> None:
    config = _load_config()
    tracker = Tracker(run_dir, config)
    checkpoints_dir, num_readable = run_dir / "checkpoints", config.schedule.total_steps
    load_rollbacks(checkpoints_dir, num_readable, SingleRankGroup(), tracker)
    tracker.start_attempt(3)
    tracker.log_metrics(4, "main", **_METRICS)
    tracker.rewind(2)
    tracker.close()


_CONFIGS: list[Config] = []


def _load_config() -> Config:
    if not _CONFIGS:
        _CONFIGS.append(resolve_config(_compose()))  # type: ignore[arg-type]
    return _CONFIGS[0]


def _read_config(directory: Path, content: bytes) -> object:
    (directory / "config.yaml").write_bytes(content)
    load_recorded_settings(directory, "model.name", "data.tokenizer", "run.seed")
    return parse_run_config(content.decode(errors="replace"))


def _build_scores(_: Path) -> list[bytes]:
    task = {"shots": 5, "metrics": {"acc,none": 0.5}, "errors": {"acc,none": 0.1}}
    task |= {"counts": "acc,none", "questions": 10, "limit": 5, "higher_is_better": {"acc": True}}
    row = {"name": "x", "location": "/x", "step": 10, "tokens": 100, "tasks": {"mmlu": task}}
    return [json.dumps(row | {"scores": {"mmlu": 50.0}, "stderr": {"mmlu": 1.0}}).encode()]


def _read_scores(directory: Path, content: bytes) -> object:
    (directory / "evaluations").mkdir(exist_ok=True)
    path = directory / "evaluations/x.json"
    path.write_bytes(content)
    evaluation_results.load_completed_tasks(path, None)
    models = evaluation_results.load_evaluated_models(directory)
    score_tables.format_scores(score_tables.compare_scores([*models, *models]))
    return evaluation_results.format_paper_tables(models)


def _build_items(directory: Path) -> list[bytes]:
    write_model(directory, 3, 0.5, 0)
    files = sorted((directory / "evaluations/scores_harness").glob("samples_*"))
    return [file.read_bytes() for file in files]


def _read_items(directory: Path, content: bytes) -> object:
    path = directory / "samples.jsonl"
    path.write_bytes(content)
    return evaluation_items.load_items(path, {})


def _build_sweep(_: Path) -> list[bytes]:
    rows = [{"number": i, "run_folder": f"/runs/{i}", "overrides": [f"a={i}"]} for i in range(3)]
    return [serialize_rows([*rows, {"overrides": ["a=9"], "problems": ["a is too large"]}])]


def _read_sweep(directory: Path, content: bytes) -> object:
    (directory / "sweep.jsonl").write_bytes(content)
    sweep_log.find_run_dir(directory, ["a=7"])
    sweep_log.count_seeds(directory)
    sweep_log.list_stopped_points(directory)
    return sweep_log.list_run_dirs(directory), sweep_log.list_skipped_points(directory)


def _build_problems(_: Path) -> list[bytes]:
    problem = {"task_id": "HumanEval/0", "prompt": "def f(x):\n", "entry_point": "f"}
    problem |= {
        "test": "def check(f):\n    assert f(1) == 1\n",
        "canonical_solution": "    return x",
    }
    return [serialize_rows([problem, problem | {"task_id": "HumanEval/1"}])]


def _read_problems(name: str) -> Callable[[Path, bytes], object]:
    def read(directory: Path, content: bytes) -> object:
        (directory / name).write_bytes(content)
        problems = humaneval.load_problems(directory / name)
        return [f"{one.prompt}{one.test}{one.entry_point}".encode() for one in problems]

    return read


def _build_compressed_problems(directory: Path) -> list[bytes]:
    import gzip

    return [gzip.compress(content) for content in _build_problems(directory)]


def _build_index(directory: Path) -> list[bytes]:
    root = directory / "root"
    (root / "x").mkdir(parents=True)
    (root / "x" / EVENTS).write_bytes(serialize_rows(EVENT_ROWS))
    (root / "x/config.yaml").write_text("run: {seed: 1}\n")
    load_run_list(root)
    return [(root / INDEX_NAME).read_bytes()]


def _read_index(directory: Path, content: bytes) -> object:
    (directory / "root" / INDEX_NAME).write_bytes(content)
    runs = load_run_list(directory / "root")
    assert [row["run"] for row in runs.rows] == ["x"]
    return runs.settings


def _build_rollbacks(directory: Path) -> list[bytes]:
    rollbacks = [Rollback(5, range(8, 11)), Rollback(0, range(3, 4))]
    save_rollbacks(directory, rollbacks)
    return [(directory / ROLLBACKS_FILE).read_bytes()]


def _read_rollbacks(directory: Path, content: bytes) -> object:
    (directory / ROLLBACKS_FILE).write_bytes(content)
    return load_rollbacks(directory, 20, SingleRankGroup(), Tracker(directory, _load_config()))


TARGETS = [
    Target("run_index", _build_index, _read_index, mutate_bytes, INDEX_NAME),
    *(
        Target(
            name.partition(".")[0],
            _build_run_file(name),
            _read_run(name),
            either(mutate, mutate, mutate_bytes),
            name,
        )
        for name, mutate in {
            METRICS: mutate_rows,
            EVENTS: mutate_rows,
            "provenance.json": mutate_json,
        }.items()
    ),
    Target(
        "run_config",
        _build_run_file("config.yaml"),
        _read_config,
        either(mutate_text, mutate_bytes),
        "",
    ),
    Target(
        "rollbacks",
        _build_rollbacks,
        _read_rollbacks,
        either(mutate_json, mutate_bytes),
        ROLLBACKS_FILE,
    ),
    Target("items", _build_items, _read_items, either(mutate_rows, mutate_bytes), "samples.jsonl"),
    Target("scores", _build_scores, _read_scores, either(mutate_json, mutate_bytes), "x.json"),
    Target("sweep", _build_sweep, _read_sweep, either(mutate_rows, mutate_bytes), "sweep.jsonl"),
    Target(
        "humaneval",
        _build_problems,
        _read_problems("HumanEval.jsonl"),
        either(mutate_rows, mutate_bytes),
        "HumanEval.jsonl",
    ),
    Target(
        "humaneval_gzip",
        _build_compressed_problems,
        _read_problems("HumanEval.jsonl.gz"),
        mutate_bytes,
        "HumanEval.jsonl.gz",
    ),
]
