"""One rank tokenises, the others that hold parts of the same model receive.

Tensor- and pipeline-parallel peers need the same batch. In HLAT's release each of them tokenised it
again, 256 times for one batch of the 70B model. Here the first of them draws; batch and states go
to its peers through whatever the engine's ranks talk through, so that every rank knows where the
data stands and any of them could save it.
"""

import json

import numpy as np

from hlat.config.errors import ConfigError
from hlat.data.producer import Producer, WorkerDiedError
from hlat.data.rows import Point, States, Tokens
from hlat.parallelism.group import Group

_ERRORS = {error.__name__: error for error in (ConfigError, WorkerDiedError)}
"""What a loader knows how to deal with; anything else ends every rank."""


class SharedProducer:
    """Draws on the leader of a group, and receives on its peers."""

    def __init__(self, producer: Producer | None, group: Group, num_rows: int) -> None:
        """Join the group.

        Args:
            producer: What draws, on the leader; None on its peers.
            group: The ranks that need the same batches; all of them call `next` alike.
            num_rows: Rows of a batch.
        """
        assert group.leads == (producer is not None)
        self._producer = producer
        self._group = group
        self._num_rows = num_rows
        self._point: Point | None = None

    def start(self, point: Point) -> None:
        """Prepare the batches after a point, on the leader, when the next one is asked for."""
        self._point = point

    def next(self) -> tuple[Tokens, States]:
        """Wait for the next batch; what fails on the leader fails on all ranks alike."""
        message = self._group.broadcast(None if self._producer is None else self._draw())
        self._point = None
        lengths = np.frombuffer(message, np.int64, 2)
        if not lengths.any():
            kind, problems = json.loads(message[lengths.nbytes :])
            raise _ERRORS.get(kind, RuntimeError)(*problems)
        num_tokens, num_states = (int(length) for length in lengths)
        states = np.frombuffer(message, np.int64, num_states, lengths.nbytes)
        begin = lengths.nbytes + states.nbytes
        tokens = np.frombuffer(message, np.int32, num_tokens, begin)
        shape = (self._num_rows, -1)
        return tokens.reshape(shape).copy(), states.reshape(shape).copy()

    def close(self) -> None:
        """Stop preparing, on the leader."""
        if self._producer is not None:
            self._producer.close()

    def _draw(self) -> bytes:
        """The numbers of tokens and states, then both; or two zeros and what went wrong."""
        assert self._producer is not None
        try:
            if self._point is not None:
                self._producer.start(self._point)
            tokens, states = self._producer.next()
        except Exception as error:  # the peers wait, and must not for ever
            problems = error.problems if isinstance(error, ConfigError) else [str(error)]
            told = json.dumps([type(error).__name__, list(problems)])
            return np.zeros(2, np.int64).tobytes() + told.encode()
        lengths = np.array([tokens.size, states.size], np.int64)
        return lengths.tobytes() + states.tobytes() + tokens.tobytes()
