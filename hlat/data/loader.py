"""The public face of the data room: global batches, their state, and held-out text.

A training loop must never wait for data and never lose or repeat any of it. Batches are prepared
ahead in the background, each with the state that follows it, so that the state a checkpoint takes
describes what the loop has received and nothing of what is merely prepared.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypedDict

from hlat.config.batch import Batch
from hlat.config.data import Data
from hlat.config.errors import ConfigError
from hlat.config.phase import Phase
from hlat.data.heldout import HeldOut, pack_heldout
from hlat.data.mixture import Stage, Timeline, make_timeline
from hlat.data.sequences import Sequences, in_documents
from hlat.data.source import Source, open_sources
from hlat.data.streams import Stream, next_sequences
from hlat.data.tokenizer import Tokenizer

STATE_VERSION = 1


class Ledger(TypedDict):
    """What has been read from one source (JSON-able)."""

    tokens: int
    documents: int
    """Documents finished, empty ones included."""
    epochs: float
    """The same in passes over the source's training documents."""


@dataclass(frozen=True)
class _Prepared:
    """A batch of rows, and the state after it."""

    sequences: Sequences
    state: dict[str, Any]


class Loader:
    """Batches of one rank, in the order that all ranks share. Made by `open_loader`."""

    def __init__(
        self,
        sources: dict[str, Source],
        tokenizer: Tokenizer,
        timeline: Timeline,
        streams: list[Stream],
        sequence_length: int,
        data: Data,
        fingerprint: dict[str, Any],
    ) -> None:
        """Stand before the first batch; `open_loader` knows what belongs together."""
        self.fingerprint = fingerprint
        """What a resumed run must share with the one it resumes, by config key (JSON-able)."""
        self.vocab_size = tokenizer.vocab_size
        """Rows that an embedding needs: the largest token id, plus one."""
        self.wait_seconds = 0.0
        """Seconds that the last `next` waited for its batch."""
        self._sources = sources
        self._tokenizer = tokenizer
        self._timeline = timeline
        self._streams = streams
        self._sequence_length = sequence_length
        self._data = data
        self._step = 0
        self._stage = timeline.at(0)
        for stream in streams:
            stream.begin(self._stage)
        self._returned = self._snapshot()
        self._pending: deque[Future[_Prepared]] = deque()
        self._thread = ThreadPoolExecutor(1, "hlat-data")

    def next(self) -> Sequences:
        """The rank's part of the next global batch.

        Returns:
            Sequences [global_batch_size / num_ranks, sequence_length]; row k is row rank + k *
            num_ranks of the global batch.

        Raises:
            ConfigError: If a file turns out to be damaged. The batch can be asked for again.
        """
        start = time.perf_counter()
        while len(self._pending) <= self._data.prefetch:
            self._pending.append(self._thread.submit(self._prepare))
        try:
            prepared = self._pending.popleft().result()
        except BaseException:
            self._rewind()
            raise
        self._returned = prepared.state
        self.wait_seconds = time.perf_counter() - start
        return prepared.sequences

    @property
    def stage(self) -> str:
        """Name of the phase's stage that the last returned batch belongs to."""
        return str(self._returned["stage"]["name"])

    def state(self) -> dict[str, Any]:
        """What resuming after the last returned batch needs (JSON-able).

        It holds the rank's own streams only; `merge_states` joins those of all ranks into the state
        of the run, which any number of ranks can restore.
        """
        return self._returned

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue after the batch that a state follows, taken on any number of ranks.

        Raises:
            ConfigError: If the state is of other data, or lacks one of the rank's streams.
        """
        problems = (
            []
            if state["version"] == STATE_VERSION
            else [
                f"the checkpoint's data state has version {state['version']}, not {STATE_VERSION}; "
                "resume it with the hlat that wrote it"
            ]
        )
        problems += _differences(self.fingerprint, state["fingerprint"])
        own = [str(stream.number) for stream in self._streams]
        if missing := [number for number in own if number not in state["streams"]]:
            problems.append(
                f"the checkpoint's data state lacks streams {', '.join(missing)} of this rank; "
                "merge the states of all ranks that wrote it"
            )
        if problems:
            raise ConfigError(*problems)
        self._returned = {
            **state,
            "fingerprint": self.fingerprint,
            "streams": {number: state["streams"][number] for number in own},
        }
        self._rewind()

    def ledger(self) -> dict[str, Ledger]:
        """What the rank's streams have read from each source, up to the last returned batch."""
        return {name: self._ledger_of(source) for name, source in self._sources.items()}

    def heldout(self, sequences_per_source: int) -> dict[str, HeldOut]:
        """Held-out sequences of every source, the same on every rank; see `pack_heldout`.

        Raises:
            ConfigError: If the held-out documents of a source do not fill one sequence.
        """
        return {
            name: pack_heldout(
                source, self._tokenizer, sequences_per_source, self._sequence_length, self._data
            )
            for name, source in self._sources.items()
        }

    def close(self) -> None:
        """Stop preparing batches and wait until the background thread has ended."""
        self._pending.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _ledger_of(self, source: Source) -> Ledger:
        streams = self._returned["streams"].values()
        cursors = [stream["cursors"][source.name] for stream in streams]
        documents = sum(cursor[0] for cursor in cursors)
        tokens = sum(cursor[2] for cursor in cursors)
        return Ledger(tokens=tokens, documents=documents, epochs=documents / source.num_training)

    def _prepare(self) -> _Prepared:
        """Draw the next batch; runs in the background thread."""
        self._stage = self._timeline.at(self._step)
        tokens = next_sequences(
            self._streams, self._stage, self._sources, self._tokenizer, self._sequence_length
        )
        self._step += 1
        sequences = in_documents(tokens, self._tokenizer.eos, self._data)
        return _Prepared(sequences, self._snapshot())

    def _snapshot(self) -> dict[str, Any]:
        stage = self._stage
        return {
            "version": STATE_VERSION,
            "fingerprint": self.fingerprint,
            "step": self._step,
            "stage": {"name": stage.name, "start": stage.start, "shares": dict(stage.shares)},
            "streams": {str(stream.number): stream.state() for stream in self._streams},
        }

    def _rewind(self) -> None:
        """Drop what is prepared and stand after the last returned batch again."""
        for future in self._pending:
            future.cancel()
        self._thread.submit(lambda: None).result()
        self._pending.clear()
        stage = self._returned["stage"]
        self._stage = Stage(stage["start"], tuple(sorted(stage["shares"].items())), stage["name"])
        self._step = self._returned["step"]
        for stream in self._streams:
            stream.restore(self._returned["streams"][str(stream.number)], self._stage)


def open_loader(
    data: Data, phase: Phase, batch: Batch, seed: int, rank: int = 0, num_ranks: int = 1
) -> Loader:
    """Open the sources and the tokenizer of a run for one data-parallel rank.

    Args:
        data: The corpus.
        phase: The mixture over time.
        batch: Sizes of a step; global_batch_size is the number of streams.
        seed: Seed of the order.
        rank: The data-parallel rank.
        num_ranks: Number of data-parallel ranks; divides global_batch_size.

    Returns:
        A loader before its first batch.

    Raises:
        ConfigError: If a file, column, weight or size does not fit.
    """
    assert 0 <= rank < num_ranks
    assert batch.global_batch_size % num_ranks == 0
    timeline = make_timeline(phase, data, batch)
    tokenizer = Tokenizer(data.tokenizer, data.root, data.eos_token)
    sources = open_sources(data, seed)
    num_streams = batch.global_batch_size
    streams = [
        Stream(number, num_streams, list(sources), batch.sequence_length)
        for number in range(rank, num_streams, num_ranks)
    ]
    return Loader(
        sources=sources,
        tokenizer=tokenizer,
        timeline=timeline,
        streams=streams,
        sequence_length=batch.sequence_length,
        data=data,
        fingerprint=_fingerprint(data, batch, seed, tokenizer, sources),
    )


def _fingerprint(
    data: Data, batch: Batch, seed: int, tokenizer: Tokenizer, sources: Mapping[str, Source]
) -> dict[str, Any]:
    return {
        "run.seed": seed,
        "batch.global_batch_size": batch.global_batch_size,
        "batch.sequence_length": batch.sequence_length,
        "data.tokenizer": tokenizer.sha256,
        "data.eos_token": data.eos_token,
        "data.heldout_documents": data.heldout_documents,
        **{f"data.sources.{name}": s.corpus.fingerprint() for name, s in sources.items()},
    }


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the states of all ranks after the same step into the state of the run."""
    assert len({state["step"] for state in states}) == 1
    streams = {number: s for state in states for number, s in state["streams"].items()}
    return {
        **states[0],
        "streams": {number: streams[number] for number in sorted(streams, key=int)},
    }


def _differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """One line for each config key whose value is not what the checkpoint was written with."""
    return [
        f"{key}: the checkpoint was written with {there.get(key, 'none')}, this run has "
        f"{here.get(key, 'none')}; restore the former, or start a new run"
        for key in sorted({*here, *there})
        if here.get(key) != there.get(key)
    ]
