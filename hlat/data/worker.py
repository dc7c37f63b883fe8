"""One worker: draws the rows that it is told to into shared memory, until its pipe ends.

Started by `hlat.data.workers`, which documents the exchange.
"""

import json
import os
import signal
import sys
from typing import Any

import numpy as np

from hlat.config.batch import Batch
from hlat.config.data import Data
from hlat.config.errors import ConfigError
from hlat.config.phase import Phase
from hlat.config.plain import from_plain
from hlat.data.corpora import open_corpora
from hlat.data.fingerprint import refuse_changed
from hlat.data.mixture import Stage
from hlat.data.rows import Point, Rows
from hlat.data.workers import Slots


def main() -> None:
    """Read a task from standard input, then answer every slot number with a batch in that slot."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR2"):  # the trainer's business
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints by accident must not reach the pipe
    try:
        _serve(json.loads(sys.stdin.readline()), replies)
    except ConfigError as error:
        print(json.dumps(error.problems), file=replies, flush=True)
    except BrokenPipeError:
        pass  # the trainer is gone


def _serve(message: dict[str, Any], replies: Any) -> None:
    data = from_plain(Data, message["data"])
    batch = from_plain(Batch, message["batch"])
    numbers = message["numbers"]
    corpora = open_corpora(data, from_plain(Phase, message["phase"]), batch, message["seed"])
    refuse_changed(corpora.fingerprint, message["fingerprint"])
    rows = Rows(corpora, batch, numbers)
    start, shares, name = message["stage"]
    stage = Stage(start, tuple((source, share) for source, share in shares), name)
    states = np.array(message["states"], np.int64)
    rows.restore(Point(message["step"], stage, states))
    descriptor, num_slots = message["slots"]
    slots = Slots(descriptor, num_slots, len(numbers), batch.sequence_length, corpora.width)
    for line in sys.stdin:
        slot = json.loads(line)
        slots.tokens[slot] = rows.draw()
        slots.states[slot] = rows.states()
        print("[]", file=replies, flush=True)
