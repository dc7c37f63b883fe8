"""The data loader of one data-parallel rank: batches, resumable state and held-out sequences.

The loader tracks the cursor after the last batch that it returned. Checkpoints save this cursor,
and prefetching restarts there after a worker failure, so every batch is returned once.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hlat.config.batch import BatchConfig
from hlat.config.batch_steps import get_batch_size, get_sequence_length
from hlat.config.data import DataConfig
from hlat.config.phase import PhaseConfig
from hlat.data import data_fingerprint, data_ledger
from hlat.data.batch_producer import BatchProducer, ThreadProducer, WorkerDiedError
from hlat.data.batch_reader import BatchReader, DataCursor, StreamStates, TokenBatch
from hlat.data.broadcast_producer import BroadcastProducer
from hlat.data.data_ledger import LedgerEntry, SourceUsage, merge_ledger_entries
from hlat.data.data_mixture import MixtureStage
from hlat.data.heldout_sequences import HeldoutSequences, pack_heldout_sequences
from hlat.data.packed_sequences import PackedSequences, build_packed_sequences
from hlat.data.training_data import TrainingData, open_training_data
from hlat.data.worker_producer import WorkerProducer, WorkerTask
from hlat.distributed.object_group import ObjectGroup

MAX_WORKER_FAILURES = 3
"""Attempts to prepare one batch with new workers before an error is raised."""

_LOG = logging.getLogger("hlat.data")


class OpenBatch(NamedTuple):
    """A full batch of which some rows were returned, and the cursor at its end."""

    tokens: TokenBatch
    end: DataCursor


class DataLoader:
    """Batches of one rank in an order that all ranks agree on; see `build_data_loader`."""

    def __init__(
        self,
        data: DataConfig,
        batch: BatchConfig,
        training_data: TrainingData,
        row_indices: list[int],
        producer: BatchProducer,
        is_reader: bool = True,
    ) -> None:
        """Create a loader positioned at the first batch; `is_reader` if this rank reads files."""
        self.fingerprint = training_data.fingerprint
        """JSON-able values, by config key, that must be equal when a run resumes."""
        self.vocab_size = training_data.tokenizer.vocab_size
        """Rows that an embedding needs: the largest token id plus one."""
        self.eos_token_id = training_data.tokenizer.eos_token_id
        """Token that ends a document."""
        self.bos_token_id = training_data.tokenizer.bos_token_id
        """Token that starts a document; None: no token."""
        self.sequence_length = batch.sequence_length
        """Tokens of a sequence of a full batch."""
        self.wait_seconds = 0.0
        """Time that the last `next_batch` waited."""
        self._data = data
        self._batch = batch
        self._training_data = training_data
        self._row_indices = row_indices
        self._dp_world_size = batch.global_batch_size // len(row_indices)
        self._cursor = BatchReader(training_data, batch, row_indices).get_cursor()
        self._open_batch: OpenBatch | None = None
        self._num_taken_rows = 0
        self._ledger_entries: list[LedgerEntry] = []
        self._producer = producer
        self._is_reader = is_reader
        self._started = False
        self._warned_sources: set[str] = set()
        self._skipped_batches: list[range] = []

    def next_batch(self, step: int | None = None) -> PackedSequences:
        """Return this rank's rows of the next global batch.

        `step`, counted from 0, determines batch size and sequence length; without it they are those
        of a full batch. Batches of any size contain the sequences of full batches in their order.

        Returns:
            Sequences [batch_size / dp_world_size, sequence_length]; row k is row dp_rank + k *
            dp_world_size of the global batch. Within batch.length_warmup, each row is divided into
            rows of equal length.

        Raises:
            ConfigError: If a file is no longer readable; a later call retries the batch.
            WorkerDiedError: If the workers end on every attempt to prepare the batch.
        """
        batch, length, start = self._batch, self._batch.sequence_length, time.perf_counter()
        size = batch.global_batch_size
        if step is not None:
            size, length = get_batch_size(step, batch), get_sequence_length(step, batch)
        tokens = self._take_rows(size // self._dp_world_size).reshape(-1, length)
        self.wait_seconds = time.perf_counter() - start
        return build_packed_sequences(tokens, self.eos_token_id, self._data, self.bos_token_id)

    def skip_batches(self, batches: Iterable[range]) -> None:
        """Skip further batches, counted from 0 including skipped ones; the state contains them."""
        new = dict.fromkeys(batches)
        self._skipped_batches += [each for each in new if each not in self._skipped_batches]

    def last_batches(self, num_sequences: int) -> range:
        """Return the shortest range of full batches that ends at the last returned sequence.

        It contains at least `num_sequences` of the global batches that were returned.
        """
        start = end = self._cursor.step + bool(self._num_taken_rows)
        num_sequences -= self._num_taken_rows * self._dp_world_size
        start -= bool(self._num_taken_rows)
        while num_sequences > 0 and start > 0:
            start -= 1
            num_sequences -= 0 if self._is_skipped(start) else self._batch.global_batch_size
        return range(start, end)

    @property
    def num_skipped_batches(self) -> int:
        """Count of batches that are skipped, before and after the cursor."""
        return sum(map(len, self._skipped_batches))

    @property
    def stage_name(self) -> str:
        """Name of the stage of the last returned sequence."""
        return (self._cursor if self._open_batch is None else self._open_batch.end).stage.name

    @property
    def next_proportions(self) -> dict[str, float]:
        """Fraction of tokens by source at the next step."""
        stage = self._training_data.mixture_schedule.get_stage(self._cursor.step)
        return dict(stage.proportions)

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-able state after the last returned batch.

        It contains the streams of this rank; `merge_state_dicts` merges those of all ranks into the
        state of the run, which any number of ranks can load.
        """
        rows = zip(self._row_indices, self._cursor.states.tolist(), strict=True)
        num_taken = self._num_taken_rows * self._dp_world_size
        return {
            "version": data_fingerprint.STATE_VERSION,
            "fingerprint": self.fingerprint,
            "step": self._cursor.step,
            "stage": self._cursor.stage.to_json(),
            "chapters": [list(entry) for entry in self._ledger_entries],
            "sources": list(self._training_data.sources),
            "streams": {str(index): row for index, row in rows},
            "skipped": [[each.start, each.stop] for each in self._skipped_batches],
            # Sequences of the next full batch that were returned; absent without batch.ramp
            **({"returned_sequences": num_taken} if num_taken else {}),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> list[str]:
        """Continue after the last batch of a state, which any number of ranks may have saved.

        Returns:
            A message for each difference that data.allow_changed accepts.

        Raises:
            ConfigError: If the state belongs to other data or lacks a stream of this rank.
        """
        rows, allowed = self._row_indices, self._data.allow_changed
        changed = data_fingerprint.compare_fingerprints(self.fingerprint, state_dict, rows, allowed)
        saved_sources, sources = state_dict["sources"], list(self._training_data.sources)
        states = np.array([state_dict["streams"][str(index)] for index in rows], np.int64)
        stage = MixtureStage.from_json(state_dict["stage"])
        states = data_fingerprint.adapt_states(states, saved_sources, sources, changed)
        self._cursor = DataCursor(state_dict["step"], stage, states)
        # One rank continues the totals of all ranks, which preserves their sum
        known = saved_sources if 0 in rows else []
        entries = [LedgerEntry(*entry) for entry in state_dict["chapters"]]
        self._ledger_entries = [entry.remap_sources(known, sources) for entry in entries]
        # Earlier versions saved no skipped batches
        self._skipped_batches = [range(*bounds) for bounds in state_dict.get("skipped", [])]
        self._open_batch, self._started = None, False
        self._num_taken_rows = state_dict.get("returned_sequences", 0) // self._dp_world_size
        return list(changed.values())

    def compute_ledger(self, state_dict: Mapping[str, Any] | None = None) -> dict[str, SourceUsage]:
        """Return the usage of each source by the streams of this rank or of a state."""
        states = self._cursor.states if state_dict is None else _stack_states(state_dict)
        return data_ledger.build_source_usage(
            data_ledger.compute_totals(states), self._count_documents_per_epoch()
        )

    def compute_ledger_by_stage(
        self, state_dict: Mapping[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Return the usage of each stage; after a resume only the sum over ranks is meaningful."""
        cursor, entries = self._cursor, self._ledger_entries
        if state_dict is not None:
            cursor = DataCursor(cursor.step, cursor.stage, _stack_states(state_dict))
            entries = [LedgerEntry(*entry) for entry in state_dict["chapters"]]
        return data_ledger.compute_usage_by_stage(
            entries, cursor, self._count_documents_per_epoch()
        )

    def build_heldout_sequences(self, sequences_per_source: int) -> dict[str, HeldoutSequences]:
        """Return held-out sequences of every source, identical on every rank.

        Raises:
            ConfigError: If the held-out documents of a source have no text in the loss.
        """
        settings = sequences_per_source, self.sequence_length, self._data
        tokenizer, sources = self._training_data.tokenizer, self._training_data.sources
        return {
            name: pack_heldout_sequences(source, tokenizer, *settings)
            for name, source in sources.items()
        }

    def epoch_warnings(self, state_dict: Mapping[str, Any] | None = None) -> list[str]:
        """Return a warning for each source that newly exceeds data.warn_epochs."""
        limit, ledger = self._data.warn_epochs, self.compute_ledger(state_dict)
        exceeded = {name: e["epochs"] for name, e in ledger.items() if e["epochs"] > limit}
        warned, self._warned_sources = self._warned_sources, self._warned_sources | set(exceeded)
        return [
            f"data.sources.{name} has been read {epochs:.1f} times, more than "
            f"data.warn_epochs={limit:g}"
            for name, epochs in exceeded.items()
            if name not in warned
        ]

    def lost_text_notes(self) -> list[str]:
        """Return a line per source if the tokenizer loses a part of its held-out text."""
        return [
            f"data.tokenizer={self._data.tokenizer} loses {lost} of the held-out text of {name}"
            for name, lost in self._training_data.lost_text.items()
            if lost.num_lost
        ]

    def validate_files(self) -> None:
        """Compare this rank's share of the files with their state when they were opened.

        Each data-parallel rank compares some files: size, modification time, and checksums of some
        documents.

        Raises:
            ConfigError: If a file is missing or has changed.
        """
        if self._is_reader:
            for source in self._training_data.sources.values():
                source.dataset.validate_content(self._row_indices[0], self._dp_world_size)

    def close(self) -> None:
        """Stop prefetching and wait for its threads or processes to end."""
        self._producer.close()

    def _is_skipped(self, batch: int) -> bool:
        return any(batch in batches for batches in self._skipped_batches)

    def _take_rows(self, count: int) -> TokenBatch:
        """Return the next rows, which are not skipped; after an error, a later call repeats them.

        The cursor moves after the last row of a full batch.
        """
        start = self._cursor, self._num_taken_rows, len(self._ledger_entries)
        parts = list[TokenBatch]()
        try:
            while count:
                batch = self._open_batch = self._open_batch or self._read_full_batch()
                part = batch.tokens[self._num_taken_rows : self._num_taken_rows + count]
                count -= len(part)
                self._num_taken_rows += len(part)
                if self._num_taken_rows == len(batch.tokens):
                    self._close_batch(batch)
                parts.append(part)
        except BaseException:
            self._cursor, self._num_taken_rows, num_entries = start
            del self._ledger_entries[num_entries:]
            self._open_batch, self._started = None, False
            raise
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read_full_batch(self) -> OpenBatch:
        """Return the next full batch that is not skipped."""
        while True:
            tokens, states = self._receive_batch()
            stage = self._training_data.mixture_schedule.get_stage(self._cursor.step)
            batch = OpenBatch(tokens, DataCursor(self._cursor.step + 1, stage, states))
            if not self._is_skipped(self._cursor.step):
                return batch
            self._close_batch(batch)

    def _close_batch(self, batch: OpenBatch) -> None:
        """Move the cursor to the end of a batch, and start a ledger entry with its stage."""
        previous = self._cursor
        if batch.end.stage != previous.stage and previous.step > 0:
            totals = data_ledger.compute_totals(previous.states).tolist()
            self._ledger_entries.append(LedgerEntry(previous.stage.name, previous.step, totals))
        self._cursor, self._open_batch, self._num_taken_rows = batch.end, None, 0

    def _receive_batch(self) -> tuple[TokenBatch, StreamStates]:
        for _ in range(MAX_WORKER_FAILURES):
            try:
                if not self._started:
                    self._producer.start(self._cursor)
                    self._started = True
                return self._producer.next_batch()
            except WorkerDiedError as error:
                self._started = False
                _LOG.warning("a data worker %s; starting it again", error)
        raise WorkerDiedError(
            f"data workers end every time that they prepare batch {self._cursor.step}; "
            "data.workers=0 prepares it in the trainer's own process"
        )

    def _count_documents_per_epoch(self) -> dict[str, int]:
        sources = self._training_data.sources
        return {name: source.num_training_documents for name, source in sources.items()}


def build_data_loader(
    data: DataConfig,
    phase: PhaseConfig,
    batch: BatchConfig,
    seed: int,
    dp_rank: int = 0,
    dp_world_size: int = 1,
    model_parallel_group: ObjectGroup | None = None,
) -> DataLoader:
    """Build the data loader of one data-parallel rank, positioned at the first batch.

    `model_parallel_group` contains the ranks with shards of the same model; its rank 0 reads each
    batch.

    Raises:
        ConfigError: If a file, column, weight or size is invalid.
    """
    assert 0 <= dp_rank < dp_world_size
    assert batch.global_batch_size % dp_world_size == 0
    training_data = open_training_data(data, phase, batch, seed)
    row_indices = list(range(dp_rank, batch.global_batch_size, dp_world_size))
    producer: BatchProducer | None = None
    is_reader = model_parallel_group is None or model_parallel_group.is_rank0
    if is_reader:
        if data.workers:
            width, fingerprint = training_data.state_width, training_data.fingerprint
            task = WorkerTask(data, phase, batch, seed, row_indices, width, fingerprint)
            producer = WorkerProducer(task, data.workers, data.prefetch)
        else:
            producer = ThreadProducer(BatchReader(training_data, batch, row_indices), data.prefetch)
    if model_parallel_group is not None:
        producer = BroadcastProducer(producer, model_parallel_group)
    assert producer is not None
    return DataLoader(data, batch, training_data, row_indices, producer, is_reader)


def _stack_states(state_dict: Mapping[str, Any]) -> StreamStates:
    return np.array([*state_dict["streams"].values()], np.int64)


def merge_state_dicts(state_dicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of all ranks after the same step into the state of the run."""
    first = state_dicts[0]
    assert all(state["step"] == first["step"] for state in state_dicts)
    assert all(state["fingerprint"] == first["fingerprint"] for state in state_dicts)
    streams = {index: row for state in state_dicts for index, row in state["streams"].items()}
    stages = zip(*(state["chapters"] for state in state_dicts), strict=True)
    return {
        **first,
        "chapters": [list(merge_ledger_entries(*entries)) for entries in stages],
        "streams": {index: streams[index] for index in sorted(streams, key=int)},
    }
