"""Writes a run's numbers where TensorBoard reads them.

TensorBoard's own record format, by its own writer of records; the asynchronous writers around it
(torch's, tensorboardX's) put a queue and a thread of their own between a full disk and whoever
should hear of it.
"""

import json
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from hlat.tracking.listener import Beginning, Row, event_scalars, scalars, sentence

FOLDER = "tensorboard"
"""In the run folder."""
_SILENT = ("ready", "ledger", "checkpoint", "evaluate", "score")
"""Events that are numbers here, or of no interest to who looks at curves."""


class TensorBoard:
    """The listener of hlat.tracking.listener."""

    def begin(self, beginning: Beginning) -> None:
        """Open a file of this attempt, which takes the place of earlier ones' later steps.

        Raises:
            OSError: The run folder takes no files.
        """
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._messages: Any = (event_pb2, summary_pb2, tensor_pb2, types_pb2)
        folder = beginning.folder / FOLDER
        folder.mkdir(exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("wb")
        self._writer = RecordWriter(self._file)
        self._write(beginning.step, file_version="brain.Event:2")
        self.rewind(beginning.step)
        told = {"config": json.dumps(beginning.config, indent=2)}
        told["code_revision"] = beginning.code_revision or "not known"
        for name, text in told.items():
            self._write_text(name, f"```\n{text}\n```", beginning.step)

    def row(self, row: Row) -> None:
        """Write the numbers of a row."""
        self._write_numbers(scalars(row), row["step"], row["time"])

    def event(self, row: Row) -> None:
        """Write the numbers of an event, or what happened in words."""
        step = row["step"]
        self._write_numbers(event_scalars(row), step, row.get("time"))
        if row["event"] not in _SILENT:
            self._write_text("events", f"{row['event']}, {sentence(row)}", step)

    def rewind(self, step: int) -> None:
        """Have TensorBoard forget what was told of steps beyond `step`."""
        event_pb2, *_ = self._messages
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(step + 1, session_log=start)

    def finish(self, summary: Mapping[str, float]) -> None:
        """Write the summary, and close the file."""
        lines = "".join(f"| {name} | {value:g} |\n" for name, value in summary.items())
        self._write_text("summary", f"| | |\n|---|---|\n{lines}", int(summary.get("step", 0)))
        self._file.close()

    def abandon(self) -> None:
        """Nothing: what was written can be read."""

    def _write_numbers(self, numbers: Mapping[str, float], step: int, at: float | None) -> None:
        _, summary_pb2, *_ = self._messages
        values = [summary_pb2.Summary.Value(tag=n, simple_value=v) for n, v in numbers.items()]
        if values:
            self._write(step, at, summary=summary_pb2.Summary(value=values))

    def _write_text(self, name: str, text: str, step: int) -> None:
        _, summary_pb2, tensor_pb2, types_pb2 = self._messages
        plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
        tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[text.encode()])
        value = summary_pb2.Summary.Value(
            tag=name,
            metadata=summary_pb2.SummaryMetadata(plugin_data=plugin),
            tensor=tensor,
        )
        self._write(step, summary=summary_pb2.Summary(value=[value]))

    def _write(self, step: int, at: float | None = None, **content: Any) -> None:
        event_pb2, *_ = self._messages
        event = event_pb2.Event(wall_time=at or time.time(), step=step, **content)
        self._writer.write(event.SerializeToString())
        self._writer.flush()
