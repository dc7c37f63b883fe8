"""Rollbacks of a run, in a file in the directory of its checkpoints.

The state of the data loader in a checkpoint contains the batches skipped when it was saved. This
file adds those skipped since then, because a rollback returns to an older checkpoint, and a
checkpoint is never modified (docs/adr/0068).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hlat.config.config_errors import ConfigError
from hlat.distributed.object_group import ObjectGroup, run_on_rank0
from hlat.storage import durable_files
from hlat.storage.bounded_files import parse_json, read_bounded
from hlat.storage.storage_path import StoragePath

if TYPE_CHECKING:
    from hlat.tracking.tracker import Tracker

ROLLBACKS_FILE = "rollbacks.json"


@dataclass(frozen=True)
class Rollback:
    """Rollback to the checkpoint of `step`; no later attempt reads the batches `skipped`."""

    step: int
    skipped: range


def load_rollbacks(
    checkpoints_dir: StoragePath, num_readable: int, group: ObjectGroup, tracker: "Tracker"
) -> list[Rollback]:
    """Return the rollbacks of a run on all ranks of a group, oldest first.

    Without the file, as in runs of earlier versions, they are those of the events.

    Args:
        checkpoints_dir: Directory of the run's checkpoints.
        num_readable: Number of batches that the run reads without these rollbacks, at most.
        group: All ranks of the run; rank 0 reads.
        tracker: Events of the run.

    Raises:
        ConfigError: A rollback skips batches that the run cannot have read.
    """
    path = checkpoints_dir / ROLLBACKS_FILE

    def read() -> list[Any]:
        if not path.exists():
            events = tracker.get_events("rollback")
            return ["events.jsonl", [[row.get("to"), row.get("left_out")] for row in events]]
        content = read_bounded(path) if isinstance(path, Path) else path.read_bytes()
        try:
            return [str(path), [[row["to"], row["skipped"]] for row in parse_json(content)]]
        except (KeyError, TypeError, ValueError):
            return [str(path), [None]]

    file, rows = run_on_rank0(group, read)
    return _parse_rollbacks(rows, num_readable, file)


def save_rollbacks(checkpoints_dir: StoragePath, rollbacks: list[Rollback]) -> None:
    """Write all rollbacks of a run durably.

    Raises:
        OSError: If the file cannot be written; it is unchanged.
    """
    rows = [{"to": r.step, "skipped": [r.skipped.start, r.skipped.stop]} for r in rollbacks]
    content = json.dumps(rows).encode()
    durable_files.replace_file(checkpoints_dir / ROLLBACKS_FILE, content, durable=True)


def _parse_rollbacks(rows: list[Any], num_readable: int, file: str) -> list[Rollback]:
    rollbacks = []
    for row in rows:
        match row:
            case [int(step), [int(start), int(stop)]] if 0 <= start < stop <= num_readable:
                rollbacks.append(Rollback(step, range(start, stop)))
                num_readable += stop - start
            case _:
                raise ConfigError(
                    f"{file} has the rollback {row}, of a step and the batches that it skips, but "
                    f"the run reads at most {num_readable}; the file was damaged: correct it, or "
                    "remove the row"
                )
    return rollbacks
