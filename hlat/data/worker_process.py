"""Main function of a worker process of the data loader, which reads and tokenizes documents.

`hlat.data.worker_producer` starts it and documents the protocol.
"""

import json
import os
import sys
from typing import Any

import numpy as np

from hlat.config.batch import BatchConfig
from hlat.config.config_errors import ConfigError
from hlat.config.config_json import parse_section
from hlat.config.data import DataConfig
from hlat.config.phase import PhaseConfig
from hlat.config.redaction import record_variables
from hlat.data.batch_reader import BatchReader, DataCursor
from hlat.data.data_fingerprint import validate_same_fingerprint
from hlat.data.data_mixture import MixtureStage
from hlat.data.training_data import open_training_data
from hlat.data.worker_producer import map_batch_slots
from hlat.distributed import process_signals


def main() -> None:
    """Read a task from standard input, then write one batch per requested buffer slot."""
    process_signals.kill_with_parent()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # stray prints must not reach the pipe
    try:
        _run_worker(json.loads(sys.stdin.readline()), replies)
    except ConfigError as error:
        print(json.dumps(error.problems), file=replies, flush=True)
    except BrokenPipeError:
        pass  # the trainer ended


def _run_worker(message: dict[str, Any], replies: Any) -> None:
    record_variables(message["redacted"])
    data = parse_section(DataConfig, message["data"])
    batch = parse_section(BatchConfig, message["batch"])
    phase = parse_section(PhaseConfig, message["phase"])
    row_indices = message["numbers"]
    training_data = open_training_data(data, phase, batch, message["seed"])
    validate_same_fingerprint(training_data.fingerprint, message["fingerprint"])
    reader = BatchReader(training_data, batch, row_indices)
    stage, states = MixtureStage.from_json(message["stage"]), np.array(message["states"], np.int64)
    reader.restore(DataCursor(message["step"], stage, states))
    descriptor, num_slots = message["slots"]
    width = training_data.state_width
    slots = map_batch_slots(descriptor, num_slots, len(row_indices), batch.sequence_length, width)
    for line in sys.stdin:
        slot = json.loads(line)
        slots["tokens"][slot], slots["states"][slot] = reader.read_batch()
        print("[]", file=replies, flush=True)
