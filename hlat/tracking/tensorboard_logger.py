"""TensorBoard event files of a run (SummaryWriter).

Events are written with TensorBoard's synchronous RecordWriter. The asynchronous writers of torch
and tensorboardX hide write errors, such as a full disk, in a thread.
"""

import json
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from hlat.tracking.metric_logger import (
    MetricLogger,
    RunInfo,
    extract_event_scalars,
    extract_scalars,
    format_alert,
    format_samples,
)
from hlat.tracking.row_validation import Row

LOG_DIR = "tensorboard"
"""Directory of the event files in the run directory."""
_EVENTS_WITHOUT_TEXT = ("ready", "ledger", "checkpoint", "evaluate", "score", "samples")
"""Events that are logged as scalars, or not at all."""


class TensorBoardLogger(MetricLogger):
    """Logger that writes one event file per attempt."""

    def start(self, run_info: RunInfo) -> None:
        """Open the event file, which replaces later steps of earlier attempts."""
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._protos: Any = (event_pb2, summary_pb2, tensor_pb2, types_pb2)
        log_dir = run_info.run_dir / LOG_DIR
        log_dir.mkdir(exist_ok=True)
        # TensorBoard reads the files of a directory in the order of their names
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (log_dir / name).open("wb")
        self._writer = RecordWriter(self._file)
        self._write_event(run_info.step, file_version="brain.Event:2")
        self.rewind(run_info.step)
        texts = {
            "config": json.dumps(run_info.config, indent=2),
            "code_revision": run_info.code_revision or "unknown",
        }
        for name, text in texts.items():
            self._write_text(name, f"```\n{text}\n```", run_info.step)

    def log_metrics(self, row: Row) -> None:
        """Write the scalars of a row of metrics.jsonl."""
        self._write_scalars(extract_scalars(row), row["step"], row["time"])

    def log_event(self, row: Row) -> None:
        """Write the scalars of an event, or its description as text."""
        step = row["step"]
        self._write_scalars(extract_event_scalars(row), step, row.get("time"))
        if row["event"] == "samples":
            self._write_text("samples", format_samples(row), step)
        if row["event"] not in _EVENTS_WITHOUT_TEXT:
            self._write_text("events", f"{row['event']}, {format_alert(row)}", step)

    def rewind(self, step: int) -> None:
        """Write a session start, at which TensorBoard discards the data after `step`."""
        event_pb2, *_ = self._protos
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write_event(step + 1, session_log=start)

    def finish(self, summary: Mapping[str, float]) -> None:
        """Write the summary metrics as a table and close the file."""
        lines = "".join(f"| {name} | {value:g} |\n" for name, value in summary.items())
        self._write_text("summary", f"| | |\n|---|---|\n{lines}", int(summary.get("step", 0)))
        self._file.close()

    def _write_scalars(
        self, scalars: Mapping[str, float], step: int, wall_time: float | None
    ) -> None:
        _, summary_pb2, *_ = self._protos
        values = [summary_pb2.Summary.Value(tag=n, simple_value=v) for n, v in scalars.items()]
        if values:
            self._write_event(step, wall_time, summary=summary_pb2.Summary(value=values))

    def _write_text(self, name: str, text: str, step: int) -> None:
        _, summary_pb2, tensor_pb2, types_pb2 = self._protos
        plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
        tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[text.encode()])
        metadata = summary_pb2.SummaryMetadata(plugin_data=plugin)
        value = summary_pb2.Summary.Value(tag=name, metadata=metadata, tensor=tensor)
        self._write_event(step, summary=summary_pb2.Summary(value=[value]))

    def _write_event(self, step: int, wall_time: float | None = None, **content: Any) -> None:
        event_pb2, *_ = self._protos
        event = event_pb2.Event(wall_time=wall_time or time.time(), step=step, **content)
        self._writer.write(event.SerializeToString())
        self._writer.flush()
