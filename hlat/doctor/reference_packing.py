"""Reference implementation of mixing and packing, from the documents of each source.

It reads documents and tokens without delimiters, and shares no other code with hlat.data. A row of
the global batch is an endless stream. Stream i of n reads documents i, i + n, i + 2 n, ... of each
source in training order. A source is read for one document, or for the rows that four sequences
complete, and then the next source is selected (ADR 0012).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, repeat

import numpy as np
from numpy.typing import NDArray

from hlat.config.batch import BatchConfig
from hlat.config.run import Config

_SEQUENCES_PER_TURN = 4

ReadTokens = Callable[[str, int], NDArray[np.int32]]
"""Returns the tokens of a document without delimiters, given source and training position."""


@dataclass
class _SourceState:
    """Progress of a stream in one source: documents, rest of the open one, tokens of the stage."""

    num_documents: int = 0
    rest: list[int] = field(default_factory=list)
    stage_tokens: int = 0


@dataclass(frozen=True)
class Delimiters:
    """Tokens before and after each document; None: no token."""

    bos: int | None
    eos: int


def find_stage(config: Config, num_full_batches: float) -> int:
    """Return the index of the stage that contains the first token after some full batches."""
    ends = [*accumulate(stage.tokens or 0 for stage in config.phase.timeline)]
    return sum(end <= num_full_batches * config.batch.tokens_per_step for end in ends[:-1])


def iter_batch_sizes(batch: BatchConfig) -> Iterator[int]:
    """Yield the sequences of each step: start + i x increment after i / n of the ramp's tokens."""
    ramp, size, tokens = batch.ramp, batch.global_batch_size, 0
    if ramp.start is not None and ramp.tokens is not None:
        increment = ramp.increment or ramp.start
        num_increments = (size - ramp.start) // increment
        while (i := tokens * num_increments // ramp.tokens) < num_increments:
            yield ramp.start + i * increment
            tokens += (ramp.start + i * increment) * batch.sequence_length
    yield from repeat(size)


def pack_stream(
    config: Config, index: int, num_sequences: int, delimiters: Delimiters, read: ReadTokens
) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
    """Return the first sequences of a stream, the document of each token, and the ended documents.

    Both arrays are [num_sequences, sequence_length].
    """
    stream = _Stream(config, index, delimiters, read)
    rows = [stream.fill_row(step) for step in range(num_sequences)]
    tokens, documents = (np.array(values, np.int32) for values in zip(*rows, strict=True))
    return tokens, documents, stream.num_ended


class _Stream:
    """One row of the global batch over the steps of a run."""

    def __init__(
        self, config: Config, index: int, delimiters: Delimiters, read: ReadTokens
    ) -> None:
        self._config, self._index = config, index
        self._delimiters, self._read = delimiters, read
        self._sources = {name: _SourceState() for name in sorted(config.data.sources)}
        self._stage, self._source, self._turn_rows = -1, "", 0
        self.num_ended = 0

    def fill_row(self, step: int) -> tuple[list[int], list[int]]:
        """Return tokens and documents of the next sequence."""
        self._start_stage(find_stage(self._config, step))
        length = self._config.batch.sequence_length
        tokens: list[int] = []
        documents: list[int] = []
        document = 0
        while len(tokens) < length:
            if not self._source:
                self._source, self._turn_rows = self._select_source(), 0
            taken, is_end = self._take(length - len(tokens))
            tokens += taken
            documents += [document] * len(taken)
            document += is_end
        self._turn_rows += 1
        if self._turn_rows == _SEQUENCES_PER_TURN:
            self._source = ""
        return tokens, documents

    def _start_stage(self, stage: int) -> None:
        """Restart the mixture; streams at evenly spaced points of it start with its shares."""
        if stage == self._stage:
            return
        self._stage = stage
        shares = self._compute_shares()
        for state in self._sources.values():
            state.stage_tokens = 0
        point = (self._index + 0.5) / self._config.batch.global_batch_size
        ends = zip(shares, accumulate(shares.values()), strict=True)
        self._source = next((name for name, end in ends if point < end), [*shares][-1])
        self._turn_rows = 0

    def _compute_shares(self) -> Mapping[str, float]:
        weights = self._config.phase.timeline[self._stage].weights
        if weights is None:
            weights = {name: source.weight for name, source in self._config.data.sources.items()}
        total = sum(weights.values())
        return {name: weights[name] / total for name in sorted(weights) if weights[name] > 0}

    def _select_source(self) -> str:
        """Return the eligible source whose next turn is due first (Tijdeman 1980)."""
        shares, turn = (
            self._compute_shares(),
            _SEQUENCES_PER_TURN * self._config.batch.sequence_length,
        )
        tokens = {name: self._sources[name].stage_tokens for name in shares}
        total = sum(tokens.values())
        due = {
            name: (tokens[name] + turn) / share
            for name, share in shares.items()
            if tokens[name] <= share * total + 1e-3
        }
        return min(due, key=lambda name: due[name])

    def _take(self, count: int) -> tuple[list[int], bool]:
        """Return up to `count` tokens of the selected source, and True if they end a document."""
        source, name = self._sources[self._source], self._source
        if not source.rest:
            position = source.num_documents * self._config.batch.global_batch_size + self._index
            source.rest = self._delimit(self._read(name, position).tolist())
            source.num_documents += 1
        taken, source.rest = source.rest[:count], source.rest[count:]
        source.stage_tokens += len(taken)
        is_end = bool(taken) and not source.rest
        if is_end:
            self._source = ""
            self.num_ended += 1
        return taken, is_end

    def _delimit(self, tokens: list[int]) -> list[int]:
        """Return the tokens of a document with BOS and EOS; an empty document has none."""
        if not tokens:
            return tokens
        bos = [] if self._delimiters.bos is None else [self._delimiters.bos]
        return [*bos, *tokens, self._delimiters.eos]
