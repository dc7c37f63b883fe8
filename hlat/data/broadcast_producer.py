"""Batches read by rank 0 of a model-parallel group and broadcast to its other ranks.

Tensor- and pipeline-parallel ranks need the same batch. In HLAT's release each of them tokenizes
it, 256 times per batch of the 70B model. Here one rank does. The stream states are broadcast too,
so any rank can save them.
"""

import io
import json

import numpy as np

from hlat.config.config_errors import ConfigError
from hlat.data.batch_producer import BatchProducer, WorkerDiedError
from hlat.data.batch_reader import DataCursor, StreamStates, TokenBatch
from hlat.distributed.object_group import ObjectGroup

_ERROR_TYPES = {error.__name__: error for error in (ConfigError, WorkerDiedError)}
"""Errors that `DataLoader` handles; any other error becomes a RuntimeError on every rank."""


class BroadcastProducer:
    """A producer that reads on rank 0 of a group and receives on the other ranks."""

    def __init__(self, producer: BatchProducer | None, group: ObjectGroup) -> None:
        """Create the producer of one rank; `producer` is None on all ranks but rank 0."""
        assert group.is_rank0 == (producer is not None)
        self._producer = producer
        self._group = group
        self._cursor: DataCursor | None = None

    def start(self, cursor: DataCursor) -> None:
        """Make the next call of `next_batch` start after `cursor` on rank 0."""
        self._cursor = cursor

    def next_batch(self) -> tuple[TokenBatch, StreamStates]:
        """Return the broadcast batch and states; an error of rank 0 is raised on every rank."""
        message = self._group.broadcast(
            None if self._producer is None else self._serialize_next_batch()
        )
        self._cursor = None
        if message.startswith(b"["):
            error_type, problems = json.loads(message)
            raise _ERROR_TYPES.get(error_type, RuntimeError)(*problems)
        stream = io.BytesIO(message)
        return np.load(stream), np.load(stream)

    def close(self) -> None:
        """Close the producer of rank 0."""
        if self._producer is not None:
            self._producer.close()

    def _serialize_next_batch(self) -> bytes:
        """Return tokens and states in NumPy's file format; on error a list in JSON."""
        assert self._producer is not None
        try:
            if self._cursor is not None:
                self._producer.start(self._cursor)
            tokens, states = self._producer.next_batch()
        except Exception as error:  # the other ranks wait for the broadcast
            problems = error.problems if isinstance(error, ConfigError) else [str(error)]
            return json.dumps([type(error).__name__, list(problems)]).encode()
        stream = io.BytesIO()
        np.save(stream, tokens)
        np.save(stream, states)
        return stream.getvalue()
