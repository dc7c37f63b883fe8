"""Some rows of the global batch, drawn step by step.

Whoever prepares batches, a thread of the trainer or a process of its own, draws a fixed set of rows
from the corpus. What it needs to begin, and what it leaves behind, is a point: a step and a few
integers per row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hlat.config.batch import Batch
from hlat.data.corpora import Corpora
from hlat.data.mixture import Stage
from hlat.data.streams import Stream, next_sequences

Tokens = NDArray[np.int32]
"""Token ids [rows, sequence_length]."""
States = NDArray[np.int64]
"""`Stream.state` of every row, [rows, width]."""


@dataclass(frozen=True)
class Point:
    """Where some rows stand between two batches."""

    step: int
    """Batches drawn."""
    stage: Stage
    """The stage of the last of them; before the first, that of the first."""
    states: States


class Rows:
    """Rows of the global batch, and the streams that they come from."""

    def __init__(self, corpora: Corpora, batch: Batch, numbers: Sequence[int]) -> None:
        """Stand before the first batch.

        Args:
            corpora: What they are drawn from.
            batch: Sizes of a step; global_batch_size is the number of streams.
            numbers: The rows' places in the global batch.
        """
        self._corpora = corpora
        self._length = batch.sequence_length
        names = list(corpora.sources)
        self._streams = [
            Stream(number, batch.global_batch_size, names, batch.sequence_length)
            for number in numbers
        ]
        self._step = 0
        stage = corpora.timeline.at(0)
        for stream in self._streams:
            stream.begin(stage)

    def point(self) -> Point:
        """Where the rows stand."""
        stage = self._corpora.timeline.at(max(0, self._step - 1))
        return Point(self._step, stage, self.states())

    def states(self) -> States:
        """The streams' states, [rows, width]."""
        return np.array([stream.state() for stream in self._streams], np.int64)

    def restore(self, point: Point) -> None:
        """Stand at a point; its stage may be none of the timeline's, if that was changed since."""
        self._step = point.step
        for stream, state in zip(self._streams, point.states.tolist(), strict=True):
            stream.restore(state, point.stage)

    def draw(self) -> Tokens:
        """Draw the next batch.

        Raises:
            ConfigError: If a file cannot be read any more.
        """
        corpora = self._corpora
        stage = corpora.timeline.at(self._step)
        tokens = next_sequences(
            self._streams, stage, corpora.sources, corpora.tokenizer, self._length
        )
        self._step += 1
        return tokens
