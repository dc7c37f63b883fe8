"""The public face of the data room: global batches, their state, and held-out text.

A training loop must never wait for data and never lose or repeat any of it. Whoever prepares the
batches, a thread or processes, and whatever happens to them, the loader knows where the last batch
left off that it returned: that is the state a checkpoint takes, and where preparing begins again.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hlat.config.batch import Batch
from hlat.config.data import Data
from hlat.config.phase import Phase
from hlat.data import fingerprint, ledger
from hlat.data.corpora import Corpora, open_corpora
from hlat.data.heldout import HeldOut, pack_heldout
from hlat.data.ledger import Chapter, Entry, sum_chapters
from hlat.data.mixture import Stage
from hlat.data.peers import SharedProducer
from hlat.data.producer import Producer, ThreadProducer, WorkerDiedError
from hlat.data.rows import Point, Rows, States, Tokens
from hlat.data.sequences import Sequences, in_documents
from hlat.data.workers import Task, WorkerProducer
from hlat.parallelism.group import Group

MOST_DEATHS = 3
"""Times that workers may end in the same batch before the run does."""

_log = logging.getLogger("hlat.data")


class Loader:
    """Batches of one rank, in the order that all ranks share. Made by `open_loader`."""

    def __init__(
        self, data: Data, batch: Batch, corpora: Corpora, numbers: list[int], producer: Producer
    ) -> None:
        """Stand before the first batch; `open_loader` knows what belongs together."""
        self.fingerprint = corpora.fingerprint
        """What a resumed run must share with the one it resumes, by config key (JSON-able)."""
        self.vocab_size = corpora.tokenizer.vocab_size
        """Rows that an embedding needs: the largest token id, plus one."""
        self.eos = corpora.tokenizer.eos
        """The token that ends a document."""
        self.wait_seconds = 0.0
        """Seconds that the last `next` waited for its batch."""
        self._data = data
        self._corpora = corpora
        self._numbers = numbers
        self._sequence_length = batch.sequence_length
        self._point = Rows(corpora, batch, numbers).point()
        self._chapters: list[Chapter] = []
        self._producer = producer
        self._started = False
        self._told: set[str] = set()
        self._left_out: list[range] = []

    def next(self) -> Sequences:
        """The rank's part of the next global batch.

        Returns:
            Sequences [global_batch_size / num_ranks, sequence_length]; row k is row rank + k *
            num_ranks of the global batch.

        Raises:
            ConfigError: If a file cannot be read any more. The batch can be asked for again.
            WorkerDiedError: If the batch cannot be prepared because workers end every time.
        """
        begin = time.perf_counter()
        tokens = self._draw()
        while any(self.num_drawn - 1 in batches for batches in self._left_out):
            tokens = self._draw()
        self.wait_seconds = time.perf_counter() - begin
        return in_documents(tokens, self.eos, self._data)

    def leave_out(self, batches: Sequence[range]) -> None:
        """From now on pass over batches, counted from 0 in the order in which they are drawn."""
        self._left_out = [*batches]

    def newest(self, count: int) -> range:
        """Batches up to the newest, among which at least `count` were returned."""
        start = self.num_drawn
        while count > 0 and start > 0:
            start -= 1
            count -= not any(start in batches for batches in self._left_out)
        return range(start, self.num_drawn)

    @property
    def num_drawn(self) -> int:
        """Batches drawn so far, returned or left out."""
        return self._point.step

    @property
    def stage(self) -> str:
        """Name of the phase's stage that the last returned batch belongs to."""
        return self._point.stage.name

    def state(self) -> dict[str, Any]:
        """What resuming after the last returned batch needs (JSON-able).

        It holds the rank's own streams only; `merge_states` joins those of all ranks into the state
        of the run, which any number of ranks can restore.
        """
        stage = self._point.stage
        rows = zip(self._numbers, self._point.states.tolist(), strict=True)
        return {
            "version": fingerprint.STATE_VERSION,
            "fingerprint": self.fingerprint,
            "step": self._point.step,
            "stage": {"name": stage.name, "start": stage.start, "shares": dict(stage.shares)},
            "chapters": [chapter.to_json() for chapter in self._chapters],
            "sources": list(self._corpora.sources),
            "streams": {str(number): row for number, row in rows},
        }

    def restore(self, state: Mapping[str, Any]) -> list[str]:
        """Continue after the batch that a state follows, taken on any number of ranks.

        Returns:
            A line for each difference that data.allow_changed accepts.

        Raises:
            ConfigError: If the state is of other data, or lacks one of the rank's streams.
        """
        own, allowed = self._numbers, self._data.allow_changed
        changed = fingerprint.compare(self.fingerprint, state, own, allowed)
        before, now = state["sources"], list(self._corpora.sources)
        rows = np.array([state["streams"][str(number)] for number in own], np.int64)
        told = state["stage"]
        stage = Stage(told["start"], tuple(sorted(told["shares"].items())), told["name"])
        self._point = Point(state["step"], stage, fingerprint.adapt(rows, before, now, changed))
        self._chapters = [
            Chapter.from_json(chapter).adapt(before, now, is_whole=0 in own)
            for chapter in state["chapters"]
        ]
        self._started = False
        return list(changed.values())

    def ledger(self, state: Mapping[str, Any] | None = None) -> dict[str, Entry]:
        """What streams have read from each source, up to the last returned batch.

        Args:
            state: Whose streams: those of a state of these data; None: the rank's own.
        """
        states = self._point.states if state is None else _states(state)
        return ledger.entries(ledger.totals(states), self._documents_per_epoch())

    def ledger_by_stage(self, state: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """The same for each stage of the phase so far; after a resume the sum over ranks is."""
        point, chapters = self._point, self._chapters
        if state is not None:
            point = Point(point.step, point.stage, _states(state))
            chapters = [Chapter.from_json(chapter) for chapter in state["chapters"]]
        return ledger.by_stage(chapters, point, self._documents_per_epoch())

    def heldout(self, sequences_per_source: int) -> dict[str, HeldOut]:
        """Held-out sequences of every source, the same on every rank; see `pack_heldout`.

        Raises:
            ConfigError: If the held-out documents of a source do not fill one sequence.
        """
        tokenizer, length = self._corpora.tokenizer, self._sequence_length
        return {
            name: pack_heldout(source, tokenizer, sequences_per_source, length, self._data)
            for name, source in self._corpora.sources.items()
        }

    def news(self, state: Mapping[str, Any] | None = None) -> list[str]:
        """A sentence, once, for each source that has been read more often than data.warn_epochs."""
        limit, read = self._data.warn_epochs, self.ledger(state)
        often = {name: e["epochs"] for name, e in read.items() if e["epochs"] > limit}
        told, self._told = self._told, self._told | set(often)
        return [
            f"data.sources.{name} has been read {epochs:.1f} times, more than "
            f"data.warn_epochs={limit:g}"
            for name, epochs in often.items()
            if name not in told
        ]

    def close(self) -> None:
        """Stop preparing batches and wait until all that did has ended."""
        self._producer.close()

    def _draw(self) -> Tokens:
        tokens, states = self._receive()
        stage = self._corpora.timeline.at(self._point.step)
        if stage != self._point.stage and self._point.step > 0:
            self._chapters.append(self._chapter())
        self._point = Point(self._point.step + 1, stage, states)
        return tokens

    def _receive(self) -> tuple[Tokens, States]:
        for _ in range(MOST_DEATHS):
            try:
                if not self._started:
                    self._producer.start(self._point)
                    self._started = True
                return self._producer.next()
            except WorkerDiedError as error:
                self._started = False
                _log.warning("a data worker %s; starting it again", error)
            except BaseException:
                self._started = False
                raise
        raise WorkerDiedError(
            f"data workers end every time that they prepare batch {self._point.step}; "
            "data.workers=0 prepares it in the trainer's own process"
        )

    def _chapter(self) -> Chapter:
        """The stage that the last returned batch belongs to, if it ends there."""
        return Chapter(self._point.stage.name, self._point.step, ledger.totals(self._point.states))

    def _documents_per_epoch(self) -> dict[str, int]:
        return {name: source.num_training for name, source in self._corpora.sources.items()}


def open_loader(
    data: Data,
    phase: Phase,
    batch: Batch,
    seed: int,
    rank: int = 0,
    num_ranks: int = 1,
    peers: Group | None = None,
) -> Loader:
    """Open the sources and the tokenizer of a run for one data-parallel rank.

    Args:
        data: The corpus, and how many workers prepare how many batches ahead.
        phase: The mixture over time.
        batch: Sizes of a step; global_batch_size is the number of streams.
        seed: Seed of the order.
        rank: The data-parallel rank.
        num_ranks: Number of data-parallel ranks; divides global_batch_size.
        peers: The ranks that hold parts of the same model and share one drawing of each batch.

    Returns:
        A loader before its first batch.

    Raises:
        ConfigError: If a file, column, weight or size does not fit.
    """
    assert 0 <= rank < num_ranks
    assert batch.global_batch_size % num_ranks == 0
    corpora = open_corpora(data, phase, batch, seed)
    numbers = list(range(rank, batch.global_batch_size, num_ranks))
    producer: Producer | None = None
    if peers is None or peers.leads:
        task = Task(data, phase, batch, seed, numbers, corpora.width, corpora.fingerprint)
        producer = _producer(task, corpora)
    if peers is not None:
        producer = SharedProducer(producer, peers, len(numbers))
    assert producer is not None
    return Loader(data, batch, corpora, numbers, producer)


def _producer(task: Task, corpora: Corpora) -> Producer:
    data = task.data
    if data.workers:
        return WorkerProducer(task, data.workers, data.prefetch)
    return ThreadProducer(Rows(corpora, task.batch, task.numbers), data.prefetch)


def _states(state: Mapping[str, Any]) -> States:
    """The rows of all streams of a state."""
    return np.array([*state["streams"].values()], np.int64)


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the states of all ranks after the same step into the state of the run."""
    assert len({state["step"] for state in states}) == 1
    assert all(state["fingerprint"] == states[0]["fingerprint"] for state in states)
    streams = {number: row for state in states for number, row in state["streams"].items()}
    chapters = zip(*(map(Chapter.from_json, state["chapters"]) for state in states), strict=True)
    return {
        **states[0],
        "chapters": [sum_chapters(same).to_json() for same in chapters],
        "streams": {number: streams[number] for number in sorted(streams, key=int)},
    }
