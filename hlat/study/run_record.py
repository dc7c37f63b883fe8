"""The files of a run directory as plain data.

A run may be killed while it writes, so each file may be missing, empty or truncated. Lines that
cannot be parsed are counted.
"""

import gc
import json
import math
import re
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from hlat.config.batch import BatchConfig
from hlat.config.config_errors import ConfigError
from hlat.config.hardware import HardwareConfig
from hlat.config.model import ModelConfig
from hlat.config.recorded_config import (
    load_flat_settings,
    load_study_design,
    parse_run_config,
)
from hlat.config.redaction import record_expressions, redact_text
from hlat.config.run import Config
from hlat.config.study import StudyConfig
from hlat.model.decoder_spec import compute_flops_per_token
from hlat.tracking import goodput
from hlat.tracking.prediction_file import load_prediction
from hlat.tracking.row_validation import has_valid_event_fields

Row = dict[str, Any]

_ACCOUNT_NAME = re.compile(r"(step_(\d{1,12})_rank_(\d{1,12}))_account\.json")
_RUN_FILES = ("config.yaml", "provenance.json", "metrics.jsonl", "events.jsonl")


_MODEL_PREFIXES = ("model.", "batch.", "hardware.", "extensions")
"""Prefixes of the settings that determine `ModelSettings`."""


class ModelSettings(NamedTuple):
    """Sections of a configuration that most runs of a comparison share."""

    model: ModelConfig
    batch: BatchConfig
    hardware: HardwareConfig


_PARSED_MODEL_SETTINGS: dict[str, ModelSettings] = {}


@dataclass(frozen=True)
class RunRecord:
    """Content of a run directory.

    `metrics` and `events` are rows of JSON lines files, and `config` is the text of config.yaml.
    `num_unreadable` counts lines and files that cannot be parsed. `profiles` are the accounts of
    recorded steps by the start of the names of their files, in the order of steps and ranks.
    `prediction` is the registered one of the run.
    """

    name: str
    metrics: list[Row]
    events: list[Row]
    config: str
    provenance: Row
    num_unreadable: int
    profiles: dict[str, Row] = field(default_factory=dict)
    prediction: Row = field(default_factory=dict)

    def get_column(self, key: str) -> NDArray[np.float64]:
        """Return a column of metrics.jsonl, shape (rows,); NaN if missing or not finite."""
        if key not in self._columns:
            values = [row.get(key) for row in self.metrics]
            if not set(map(type, values)) <= {int, float, type(None)}:
                values = [get_number(row, key) for row in self.metrics]
            column = np.array(values, dtype=np.float64)
            self._columns[key] = np.where(np.isfinite(column), column, np.nan)
        return self._columns[key]

    def get_finite_values(self, key: str) -> NDArray[np.float64]:
        """Return the finite values of a column of metrics.jsonl."""
        column = self.get_column(key)
        return column[~np.isnan(column)]

    def compute_median(self, key: str) -> float:
        """Return the median of a column of metrics.jsonl; NaN without finite values."""
        values = self.get_finite_values(key)
        return float(np.median(values)) if len(values) else math.nan

    @cached_property
    def _columns(self) -> dict[str, NDArray[np.float64]]:
        return {}

    @cached_property
    def flat_config(self) -> dict[str, Any]:
        """Settings by full key; empty if the configuration is invalid."""
        with suppress(ConfigError):
            return load_flat_settings(self.config)
        return {}

    @cached_property
    def valid_config(self) -> Config:
        """Typed configuration; raise ConfigError if this version cannot parse it."""
        return parse_run_config(self.config)

    @cached_property
    def parsed_config(self) -> Config | None:
        """Typed configuration; None if it is missing or this version cannot parse it."""
        with suppress(ConfigError):
            return self.valid_config if self.config else None
        return None

    @cached_property
    def model_settings(self) -> ModelSettings | None:
        """Model, batch and hardware; None if the configuration is missing or cannot be parsed.

        A configuration takes a tenth of a second to parse, so runs with equal settings of these
        sections have one object.
        """
        settings = {k: v for k, v in self.flat_config.items() if k.startswith(_MODEL_PREFIXES)}
        key = repr(sorted(settings.items()))
        if key not in _PARSED_MODEL_SETTINGS:
            config = self.parsed_config
            if config is None:
                return None
            parsed = ModelSettings(config.model, config.batch, config.hardware)
            _PARSED_MODEL_SETTINGS[key] = parsed
        return _PARSED_MODEL_SETTINGS[key]

    @property
    def flops_per_token(self) -> float:
        """FLOPs of a training token, forward and backward; NaN if the model is unknown."""
        settings = self.model_settings
        if settings is None:
            return math.nan
        return compute_flops_per_token(settings.model, settings.batch.sequence_length)

    @cached_property
    def study_design(self) -> StudyConfig:
        """Design of the study for which the run was trained; the default one if it has none."""
        return load_study_design(self.config)

    @property
    def last_attempt_events(self) -> list[Row]:
        """Events from the last start or resume on."""
        starts = [i for i, row in enumerate(self.events) if row.get("event") in ("start", "resume")]
        return self.events[starts[-1] if starts else 0 :]

    @property
    def setting_changes(self) -> dict[int, list[str]]:
        """Settings that changed at a start from a checkpoint by step, as "KEY was X, is Y".

        Settings that follow from the name of their group, such as those of precision, are omitted.
        """
        changes = {}
        for row in self.events:
            lines = row.get("changed")
            if isinstance(lines, list) and all(isinstance(line, str) for line in lines):
                groups = [line.partition(".")[0] for line in lines if ".name was " in line]
                changes[row["step"]] = [
                    line
                    for line in lines
                    if line.partition(".")[0] not in groups or ".name was " in line
                ]
        return changes

    @property
    def evaluations(self) -> dict[int, Row]:
        """Evaluation events by step, in ascending order; the last one of each step."""
        rows = {row["step"]: row for row in self.events if row.get("event") == "evaluate"}
        return dict(sorted(rows.items()))

    @property
    def scores(self) -> dict[int, Row]:
        """Score events by step, in ascending order.

        Events of the same step, which may contain different tasks, are merged; the last score of
        each task is used.
        """
        merged: dict[int, Row] = {}
        for row in self.events:
            if row.get("event") == "score" and isinstance(row.get("scores"), dict):
                earlier = merged.get(row["step"], {})
                scores = {
                    key: {**earlier.get(key, {}), **_get_dict(row, key)}
                    for key in ("scores", "stderr", "answer_bits_per_byte")
                }
                merged[row["step"]] = earlier | row | scores
        return dict(sorted(merged.items()))

    @cached_property
    def start_time(self) -> float:
        """Unix time of the first row or event; NaN without any."""
        times = [get_number(row, key) for row in self.events for key in ("time", "began")]
        times += self.get_finite_values("time")[:1].tolist()
        return min(filter(math.isfinite, times), default=math.nan)

    @cached_property
    def time_ledger(self) -> goodput.TimeLedger:
        """Wall time by attempt and kind."""
        columns = {key: self.get_column(key) for key in goodput.METRIC_COLUMNS}
        return goodput.build_time_ledger(columns, self.events)

    @property
    def data_ledger(self) -> list[Row]:
        """Data read by each phase from each source, from the last checkpoint."""
        rows = [row for row in self.events if row.get("event") == "ledger"]
        return rows[-1]["stages"] if rows else []


def load_run_record(run_dir: Path) -> RunRecord:
    """Return the content of a run directory; raise ConfigError if it contains no file of a run."""
    if not is_run_dir(run_dir):
        raise ConfigError(
            f"{run_dir} is not a run directory: it has none of {', '.join(_RUN_FILES)}"
        )
    names = ("metrics.jsonl", "events.jsonl", "provenance.json", "config.yaml")
    *texts, provenance_text, config = [_read_bytes(run_dir / name) for name in names]
    parsed = map(_parse_rows, [*texts, provenance_text.replace(b"\n", b" ")])
    (metrics, events, provenance), num_unreadable = zip(*parsed, strict=True)
    if not any((metrics, events, provenance, config)):
        raise ConfigError(f"{run_dir} contains no readable row of a run in {', '.join(_RUN_FILES)}")
    config_text = config.decode(errors="replace")
    record_expressions(config_text)
    return RunRecord(
        name=redact_text(run_dir.resolve().name),
        metrics=metrics,
        events=[row for row in events if has_valid_event_fields(row)],
        config=config_text,
        provenance=provenance[0] if provenance else {},
        num_unreadable=sum(num_unreadable),
        profiles=_load_profiles(run_dir / "profiles"),
        prediction=load_prediction(run_dir),
    )


def _load_profiles(directory: Path) -> dict[str, Row]:
    """Return the account of each recorded step and rank; damaged files are omitted."""
    found = {}
    for path in directory.glob("step_*_account.json"):
        match = _ACCOUNT_NAME.fullmatch(path.name)
        account = _parse_row(_read_bytes(path)) if match else None
        if match and isinstance(account, dict):
            found[int(match[2]), int(match[3])] = (match[1], account)
    return dict(found[key] for key in sorted(found))


def is_run_dir(directory: Path) -> bool:
    """Return True if a directory contains a file of a run."""
    return any((directory / name).is_file() for name in _RUN_FILES)


def get_run_version(run_dir: Path) -> tuple[tuple[int, int], ...]:
    """Return modification time and size of each file that `load_run_record` reads."""
    paths = [path for name in _RUN_FILES if (path := run_dir / name).is_file()]
    return tuple((status.st_mtime_ns, status.st_size) for status in map(Path.stat, paths))


def get_number(row: Row, key: str) -> float:
    """Return a number of a row; NaN if it is missing or not a number."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else math.nan


def get_numbers(row: Row, key: str) -> dict[str, float]:
    """Return a dictionary of numbers in a row, such as the bits per byte by source."""
    values = _get_dict(row, key)
    return {name: get_number(values, name) for name in values}


def _get_dict(row: Row, key: str) -> Row:
    value = row.get(key)
    return value if isinstance(value, dict) else {}


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes() if path.is_file() else b""
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})") from error


def _parse_rows(text: bytes) -> tuple[list[Row], int]:
    lines = [line for line in text.split(b"\n") if line and not line.isspace()]
    gc.disable()  # a quarter of the time with a million rows
    try:
        rows = [row for row in map(_parse_row, lines) if isinstance(row, dict)]
    finally:
        gc.enable()
    return rows, len(lines) - len(rows)


def _parse_row(line: bytes) -> Any:
    """Return the value of a line, which may contain NaN; None if it is damaged."""
    try:
        return orjson.loads(line)
    except ValueError:
        with suppress(RecursionError, ValueError):
            return json.loads(line.decode(errors="replace"))
    return None
