"""Checks of the batches: their content, their distribution over ranks, and a resume.

The content is compared with a reference that packs the documents of each source itself.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlat.config.config_errors import ConfigError
from hlat.config.run import Config
from hlat.data.data_loader import DataLoader, build_data_loader, merge_state_dicts
from hlat.data.data_source import DataSource
from hlat.data.training_data import TrainingData, open_training_data
from hlat.doctor import reference_packing
from hlat.doctor.check_result import CheckResult, FaultLocation, build_result, skip_check
from hlat.doctor.engine_harness import EngineHarness

_NUM_BATCHES = 3
_NUM_PACKED_BATCHES, _PACKED_LENGTH = 12, 512
"""Batches that are compared with the reference, of longer sequences, so that documents end."""
_MAX_DOCUMENT_BYTES = 1 << 20
"""Bytes of a document that the reference encodes; more tokens than the batches have."""
_MAX_ORDERED_DOCUMENTS = 4096
"""Positions of the training order that are compared."""
_MIN_SHUFFLED_DOCUMENTS = 16
"""Documents of which two orders are not equal by chance."""


def check_data(harness: EngineHarness) -> Iterator[CheckResult]:
    """Compare the rows of all ranks with the global batch, with documents and a resumed run."""
    parallel, group = harness.engine.parallel_state, harness.engine.parallel_state.world_group
    loaders, problem = _open_loaders(harness)
    try:
        if group.any(problem is not None):
            problems = [message for message in group.gather_object(problem) if message]
            if harness.is_rank0:
                yield skip_check("data", problems[0])
            return
        loader, resumed = loaders
        batches = [_compute_row_digests(loader, 0)]
        states = group.gather_object([parallel.dp_rank, loader.state_dict()])
        batches += [_compute_row_digests(loader, step) for step in range(1, _NUM_BATCHES)]
        state = merge_state_dicts([*dict(states).values()]) if harness.is_rank0 else None
        resumed.load_state_dict(harness.broadcast_object(state))
        resumed_batches = [_compute_row_digests(resumed, step) for step in range(1, _NUM_BATCHES)]
        is_resume_equal = resumed_batches == batches[1:]
        reports = group.gather_object([parallel.dp_rank, batches, is_resume_equal])
    finally:
        for loader in loaders:
            loader.close()
    if harness.is_rank0:
        yield _build_result(harness, reports)


def _open_loaders(harness: EngineHarness) -> tuple[list[DataLoader], str | None]:
    """Return two loaders of this rank, or the problem."""
    config, loaders = harness.config, list[DataLoader]()
    settings = (config.data, config.phase, config.batch, config.run.resolved_data_seed)
    try:
        for _ in range(2):
            loaders.append(build_data_loader(*settings, *harness.engine.parallel_state.data_shard))
    except ConfigError as error:
        return loaders, error.problems[0]
    return loaders, None


def _compute_row_digests(loader: DataLoader, step: int | None = None) -> list[str]:
    """Return a digest of each row of the next batch, of the size of a step or else a full one.

    A row has batch.sequence_length tokens, also within the warm-up of the length.
    """
    rows = loader.next_batch(step).tokens.reshape(-1, loader.sequence_length)
    return [hashlib.sha256(row.tobytes()).hexdigest()[:16] for row in rows]


def _build_result(harness: EngineHarness, reports: list[Any]) -> CheckResult:
    """Return the result, given data-parallel rank, rows and resume result of each rank."""
    config, dp = harness.config, harness.engine.parallel_state.dp_size
    # Without workers, so that those of the run are compared with a reader in this process
    config = replace(config, data=replace(config.data, workers=0, prefetch=0))
    by_rank: dict[int, Any] = {}
    faults = []
    for rank, batches, _ in reports:
        if by_rank.setdefault(rank, batches) != batches:
            faults.append(FaultLocation("rows of peers", "tp+pp"))
    loader = build_data_loader(
        config.data, config.phase, config.batch, config.run.resolved_data_seed
    )
    # Full batches, of which a ramp returns the same rows in the same order
    full_rows = iter([row for _ in range(_NUM_BATCHES) for row in _compute_row_digests(loader)])
    sizes = islice(reference_packing.iter_batch_sizes(config.batch), _NUM_BATCHES)
    global_batches = [[*islice(full_rows, size)] for size in sizes]
    loader.close()
    for i, rows in enumerate(global_batches):
        if any(by_rank[rank][i] != rows[rank::dp] for rank in by_rank):
            faults.append(FaultLocation(f"rows of batch {i}", "dp"))
    all_rows = [row for batches in by_rank.values() for rows in batches for row in rows]
    # Documents with the same text may make rows equal
    expected = Counter(row for rows in global_batches for row in rows)
    if any(count > max(1, expected[row]) for row, count in Counter(all_rows).items()):
        faults.append(FaultLocation("rows that are read twice", "dp"))
    if not all(is_resume_equal for _, _, is_resume_equal in reports):
        faults.append(FaultLocation("rows after a resume", "data"))
    num_ended, problems = _compare_content(config)
    faults += [FaultLocation(problem, "data") for problem in problems]
    return build_result(
        "data",
        faults,
        f"{len(all_rows)} sequences in {_NUM_BATCHES} batches are read once each by {dp} "
        "data-parallel ranks, and again after a resume; the tokens of "
        f"{_NUM_PACKED_BATCHES} batches, in which {num_ended} documents end, are those of the "
        "documents",
        "differ from the expected batches: "
        + ", ".join(dict.fromkeys(f"{fault.part} ({fault.axis})" for fault in faults)),
    )


def _compare_content(config: Config) -> tuple[int, list[str]]:
    """Compare longer sequences with the reference; return the ended documents and problems."""
    batch = replace(config.batch, sequence_length=_PACKED_LENGTH)
    config = replace(config, batch=batch)
    settings = (config.data, config.phase, batch, config.run.resolved_data_seed)
    data, loader = open_training_data(*settings), build_data_loader(*settings)
    measured = [loader.next_batch() for _ in range(_NUM_PACKED_BATCHES)]
    loader.close()
    problems, num_ended = _compare_order(config, data), 0
    delimiters = reference_packing.Delimiters(
        data.tokenizer.bos_token_id, data.tokenizer.eos_token_id
    )

    def read(source: str, position: int) -> NDArray[np.int32]:
        return _encode_document(data, source, position)

    for index in range(batch.global_batch_size):
        tokens, documents, count = reference_packing.pack_stream(
            config, index, _NUM_PACKED_BATCHES, delimiters, read
        )
        num_ended += count
        rows = np.stack([sequences.tokens[index] for sequences in measured])
        if not np.array_equal(rows, tokens):
            problems.append(_name_first_difference(data, rows.ravel(), tokens.ravel()))
        elif measured[0].document_ids is not None:
            ids = np.stack([sequences.document_ids[index] for sequences in measured])  # type: ignore[index]
            if not np.array_equal(ids, documents):
                problems.append("documents of the tokens")
    return num_ended, [*dict.fromkeys(problems)]


def _encode_document(data: TrainingData, source: str, position: int) -> NDArray[np.int32]:
    """Return the tokens of a document without delimiters."""
    dataset, row = data.sources[source].dataset, data.sources[source].get_training_row(position)
    text = str(dataset.read_document(row)[:_MAX_DOCUMENT_BYTES], "utf-8", "replace")
    return data.tokenizer.encode_chunks([text])[0]


def _name_first_difference(
    data: TrainingData, rows: NDArray[np.int32], expected: NDArray[np.int32]
) -> str:
    """Return the name of the token at which a stream differs from the reference."""
    bos, eos = data.tokenizer.bos_token_id, data.tokenizer.eos_token_id
    first = int(np.flatnonzero(rows != expected)[0])
    is_start = first == 0 or expected[first - 1] == eos
    if is_start and expected[first] == bos:
        return "data.bos_token before a document"
    if expected[first] == eos:
        return "data.eos_token after a document"
    return "order of documents" if is_start else "tokens of documents"


def _compare_order(config: Config, data: TrainingData) -> list[str]:
    """Return what is wrong with the training order of each source.

    An epoch has each training document once. Its order depends on the epoch and on run.seed.
    """
    problems = []
    for name, source in data.sources.items():
        count, heldout = source.num_training_documents, source.heldout_dataset
        num_reserved = len(source.dataset) - count
        other = DataSource(
            name, source.dataset, num_reserved, config.run.resolved_data_seed + 1, heldout
        )
        rows = [source.get_training_row(n) for n in range(min(count, _MAX_ORDERED_DOCUMENTS))]
        is_complete = len({*rows}) == len(rows)
        if len(rows) == count:
            rest = {*range(len(source.dataset))} - {*rows}
            texts = sorted(source.dataset.read_text(row) for row in rest)
            reserved = source.read_heldout_documents() if heldout is None else ()
            is_complete &= texts == sorted(reserved)
        if not is_complete:
            problems.append(f"documents of an epoch of data.sources.{name}")
        if count >= _MIN_SHUFFLED_DOCUMENTS:
            first = rows[:_MIN_SHUFFLED_DOCUMENTS]
            if first == [source.get_training_row(count + n) for n in range(len(first))]:
                problems.append(f"order of the second epoch of data.sources.{name}")
            if first == [other.get_training_row(n) for n in range(len(first))]:
                problems.append(f"order of another run.seed of data.sources.{name}")
    return problems
