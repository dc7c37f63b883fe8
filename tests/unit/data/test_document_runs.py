"""Test runs of documents; test_data_order.py compares the streams that read them."""

import numpy as np
import pytest

from hlat.config.batch import BatchConfig
from hlat.config.phase import PhaseConfig, PhaseStage
from hlat.data import document_runs
from hlat.data.data_mixture import build_mixture_schedule
from hlat.data.data_source import open_data_sources
from hlat.data.document_runs import DocumentRun, RunLocation, tokenize_runs
from hlat.data.token_streams import TokenStream, read_next_sequences
from hlat.data.tokenizer import Tokenizer


def read(run, length, one_document=False):
    row = np.full(length, -1, np.int32)
    count, num_finished = run.read(row, one_document)
    assert (row[count:] == -1).all()
    return row[:count].tolist(), num_finished


@pytest.fixture
def run() -> DocumentRun:
    """Return a run with empty documents at the start, in the middle and at the end."""
    return DocumentRun(np.arange(10, dtype=np.int32), [0, 3, 3, 7, 10, 10], 0)


def test_run_of_one_source_is_read_across_documents(run: DocumentRun) -> None:
    assert run.skip_empty_documents() == 1
    assert read(run, 4) == ([0, 1, 2, 3], 2)
    assert run.document_offset == 1
    assert run.skip_empty_documents() == 0
    assert read(run, 20) == ([4, 5, 6, 7, 8, 9], 2)
    assert (run.document_offset, run.is_finished) == (0, False)
    assert run.skip_empty_documents() == 1
    assert run.is_finished


def test_run_of_several_sources_stops_after_each_document(run: DocumentRun) -> None:
    assert run.skip_empty_documents() == 1
    assert read(run, 20, one_document=True) == ([0, 1, 2], 1)
    assert run.document_offset == 0
    assert run.skip_empty_documents() == 1
    assert read(run, 2, one_document=True) == ([3, 4], 0)
    assert read(run, 2, one_document=True) == ([5, 6], 1)
    assert read(run, 20, one_document=True) == ([7, 8, 9], 1)


def test_empty_documents_after_a_full_row_are_not_finished(run: DocumentRun) -> None:
    run.skip_empty_documents()
    assert read(run, 3) == ([0, 1, 2], 1)


def test_run_continues_inside_of_its_first_document() -> None:
    run = DocumentRun(np.arange(5, dtype=np.int32), [3, 5], 0)
    run.skip_tokens(2)
    assert (run.skip_empty_documents(), run.document_offset) == (0, 2)
    assert read(run, 2) == ([2, 3], 1)
    with pytest.raises(AssertionError, match="the fingerprint guarantees equal documents"):
        run.skip_tokens(3)


def test_runs_end_at_their_limits(corpora, eos, monkeypatch) -> None:
    """Bytes per missing token, size of a chunk, documents, and a long document."""
    corpora.write("alpha", ["ten bytes." for _ in range(40)])
    source = open_data_sources(corpora.data({"alpha": 1.0}), 1)["alpha"]
    encoded: list[int] = []
    tokenizer = Tokenizer("embedded", ".", eos)
    encode = tokenizer.encode_chunks
    monkeypatch.setattr(
        tokenizer, "encode_chunks", lambda texts: encoded.append(len(texts)) or encode(texts)
    )

    def count_documents(num_tokens: int) -> int:
        tokenize_runs([RunLocation("alpha", 0, 0, num_tokens)], 2, {"alpha": source}, tokenizer)
        return encoded[-1]

    assert [count_documents(n) for n in (1, 5, 10, 1000)] == [1, 2, 4, 64]
    monkeypatch.setattr(document_runs, "MAX_RUN_DOCUMENTS", 7)
    assert count_documents(1000) == 7
    monkeypatch.setattr(document_runs, "CHUNK_BYTES", 50)
    assert count_documents(1000) == 5
    monkeypatch.setattr(document_runs, "CHUNK_BYTES", 9)
    assert count_documents(1000) == 1


def test_sequence_of_short_documents_needs_few_calls_of_the_encoder(corpora, eos) -> None:
    corpora.write("alpha", [f"document {i} of a few words" for i in range(100)])
    data = corpora.data({"alpha": 1.0})
    sources, tokenizer, calls = open_data_sources(data, 1), Tokenizer("embedded", ".", eos), []
    encode = tokenizer.encode_chunks
    tokenizer.encode_chunks = lambda texts: calls.append(len(texts)) or encode(texts)
    phase = PhaseConfig("p", [PhaseStage("main")])
    stage = build_mixture_schedule(phase, data, BatchConfig(1, 1, 512)).get_stage(0)
    read_next_sequences([TokenStream(0, 1, ["alpha"], 512)], stage, sources, tokenizer, 512)
    assert len(calls) <= 3
    assert sum(calls) > 30
