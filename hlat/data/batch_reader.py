"""Reader of a fixed set of rows of the global batch, and the cursor to resume it from."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hlat.config.batch import BatchConfig
from hlat.data.data_mixture import MixtureStage
from hlat.data.token_streams import TokenStream, read_next_sequences
from hlat.data.training_data import TrainingData

TokenBatch = NDArray[np.int32]
"""Token ids [rows, sequence_length]."""
StreamStates = NDArray[np.int64]
"""`TokenStream.get_state` of every row, [rows, state_width]."""


@dataclass(frozen=True)
class DataCursor:
    """Position of some rows between two batches."""

    step: int
    """Number of batches read."""
    stage: MixtureStage
    """The stage of the last batch; the first stage before the first batch."""
    states: StreamStates


class BatchReader:
    """Reader of some rows of each global batch, one token stream per row."""

    def __init__(
        self, training_data: TrainingData, batch: BatchConfig, row_indices: Sequence[int]
    ) -> None:
        """Create one stream per row, positioned at the first batch."""
        self._training_data = training_data
        self._sequence_length = batch.sequence_length
        names = list(training_data.sources)
        self._streams = [
            TokenStream(index, batch.global_batch_size, names, batch.sequence_length)
            for index in row_indices
        ]
        self._step = 0
        stage = training_data.mixture_schedule.get_stage(0)
        for stream in self._streams:
            stream.begin_sequence(stage)

    def get_cursor(self) -> DataCursor:
        """Return the current position."""
        stage = self._training_data.mixture_schedule.get_stage(max(0, self._step - 1))
        return DataCursor(self._step, stage, self.get_states())

    def get_states(self) -> StreamStates:
        """Return the states of the streams, [rows, state_width]."""
        return np.array([stream.get_state() for stream in self._streams], np.int64)

    def restore(self, cursor: DataCursor) -> None:
        """Set the position; the mixture schedule may have changed since and lack its stage."""
        self._step = cursor.step
        for stream, state in zip(self._streams, cursor.states.tolist(), strict=True):
            stream.restore(state, cursor.stage)

    def read_batch(self) -> tuple[TokenBatch, StreamStates]:
        """Return the next batch and the states of the streams after it.

        Raises:
            ConfigError: If a file is no longer readable.
        """
        data = self._training_data
        stage = data.mixture_schedule.get_stage(self._step)
        tokens = read_next_sequences(
            self._streams, stage, data.sources, data.tokenizer, self._sequence_length
        )
        self._step += 1
        return tokens, self.get_states()
