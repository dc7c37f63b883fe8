"""Test token streams; test_data_order.py compares them with a reference."""

from collections import Counter
from itertools import chain

import numpy as np
import pyarrow as pa
import pytest

from hlat.config.batch import BatchConfig
from hlat.config.config_errors import ConfigError
from hlat.config.phase import PhaseConfig, PhaseStage
from hlat.data import document_runs
from hlat.data.data_mixture import build_mixture_schedule
from hlat.data.data_source import open_data_sources
from hlat.data.token_streams import TokenStream, read_next_sequences
from hlat.data.tokenizer import Tokenizer

S, LENGTH = 4, 32
WEIGHTS = {"alpha": 0.5, "beta": 0.3, "gamma": 0.2}


class Setting:
    """Components of a data loader."""

    def __init__(self, corpora, eos, weights=None, stages=None, tokenizer=None):
        data = corpora.data(weights)
        self.sources = open_data_sources(data, 1)
        self.tokenizer = tokenizer or Tokenizer("embedded", ".", eos)
        phase = PhaseConfig("p", stages or [PhaseStage("main")])
        self.timeline = build_mixture_schedule(phase, data, BatchConfig(S, 1, LENGTH))
        self.streams = [TokenStream(i, S, list(self.sources), LENGTH) for i in range(S)]

    def run(self, steps, start=0):
        """Return token ids [S, steps * LENGTH]."""
        batches = [
            read_next_sequences(
                self.streams, self.timeline.get_stage(step), self.sources, self.tokenizer, LENGTH
            )
            for step in range(start, start + steps)
        ]
        return np.concatenate(batches, axis=1)

    def document(self, name, position):
        text = str(self.sources[name].read_training_document(position), "utf-8")
        (ids,) = self.tokenizer.encode([text])
        return ids.tolist()

    def documents(self, name, number, count):
        """Return the tokens of a stream's first documents of a source."""
        found = (self.document(name, j * S + number) for j in range(count))
        return list(chain.from_iterable(found))


def test_stream_of_one_source_contains_consecutive_documents(corpora, eos) -> None:
    setting = Setting(corpora, eos, {"alpha": 1.0})
    rows = setting.run(100)
    for number in range(S):
        assert rows[number].tolist() == setting.documents("alpha", number, 400)[: 100 * LENGTH]


@pytest.mark.slow
def test_every_document_occurs_once_per_epoch(corpora, eos) -> None:
    """Split each stream at its EOS tokens and count the documents of the first epochs."""
    corpora.write("alpha", [f"document {i}" for i in range(40)])
    setting = Setting(corpora, eos, {"alpha": 1.0})
    n = setting.sources["alpha"].num_training_documents
    rows = setting.run(60)
    found = {}
    for number, row in enumerate(rows.tolist()):
        texts = setting.tokenizer.decode(row).split(eos)[:-1]
        found.update({j * S + number: text for j, text in enumerate(texts)})
    whole_epochs = min(p for p in range(len(found) + S) if p not in found) // n
    assert whole_epochs >= 3
    for epoch in range(whole_epochs):
        counts = Counter(found[epoch * n + i] for i in range(n))
        assert len(counts) == n
        assert set(counts.values()) == {1}


@pytest.mark.slow
def test_proportions_are_exact_to_one_segment_with_long_documents(corpora, eos) -> None:
    corpora.write("beta", ["giant " * 20_000, *corpora.documents["beta"]] * 2)
    setting = Setting(corpora, eos)
    for start in range(0, 600, 50):
        setting.run(50, start)
        for stream in setting.streams:
            read = {name: cursor.tokens for name, cursor in stream.cursors.items()}
            assert sum(read.values()) == (start + 50) * LENGTH
            for name, share in WEIGHTS.items():
                assert abs(read[name] - share * (start + 50) * LENGTH) <= 4 * LENGTH


@pytest.mark.slow
def test_stage_starts_with_its_first_sequence_and_drops_no_tokens(corpora, eos) -> None:
    stages = [
        PhaseStage("one", 20 * S * LENGTH, {"alpha": 1.0}),
        PhaseStage("two", 30 * S * LENGTH, {"beta": 1.0}),
        PhaseStage("three", None, {"alpha": 1.0}),
    ]
    setting = Setting(corpora, eos, stages=stages)
    rows = setting.run(90)
    for number in range(S):
        alpha = setting.documents("alpha", number, 200)
        beta = setting.documents("beta", number, 100)
        expected = alpha[: 20 * LENGTH] + beta[: 30 * LENGTH] + alpha[20 * LENGTH : 60 * LENGTH]
        assert rows[number].tolist() == expected


def test_proportions_are_counted_per_stage(corpora, eos) -> None:
    stages = [
        PhaseStage("one", 300 * S * LENGTH, {"alpha": 1.0}),
        PhaseStage("two", None, WEIGHTS),
    ]
    setting = Setting(corpora, eos, stages=stages)
    setting.run(300)
    setting.run(300, 300)
    for stream in setting.streams:
        for name, share in WEIGHTS.items():
            assert abs(stream.cursors[name].stage_tokens - share * 300 * LENGTH) <= 4 * LENGTH


def test_empty_documents_have_no_tokens_but_are_counted(corpora, eos) -> None:
    corpora.write("alpha", ["full", "", None, ""] * 10)
    setting = Setting(corpora, eos, {"alpha": 1.0})
    rows = setting.run(4)
    assert (rows[:, :-1] == setting.tokenizer.eos_token_id).sum() > 0
    joined = setting.tokenizer.decode(rows[0].tolist())
    assert joined.startswith(f"full{eos}full{eos}full{eos}")
    assert f"{eos}{eos}" not in joined
    documents = sum(stream.cursors["alpha"].document for stream in setting.streams)
    full = sum(stream.cursors["alpha"].tokens for stream in setting.streams) / 2
    assert documents > 2 * full


@pytest.mark.parametrize("steps", [1, 7, 40])
def test_restored_streams_continue_identically(corpora, eos, steps: int) -> None:
    corpora.write("beta", ["giant " * 900] * 10)
    setting, other = Setting(corpora, eos), Setting(corpora, eos)
    setting.run(steps)
    for stream, fresh in zip(setting.streams, other.streams, strict=True):
        fresh.restore(stream.get_state(), setting.timeline.get_stage(0))
    assert [stream.get_state() for stream in other.streams] == [
        s.get_state() for s in setting.streams
    ]
    np.testing.assert_array_equal(setting.run(30, steps), other.run(30, steps))


def test_long_documents_are_encoded_in_chunks_with_the_same_tokens(
    corpora, eos, monkeypatch
) -> None:
    """Include a document without spaces and a change of reader."""
    documents = ["word (and) more, " * 4000, "木曜日は、晴れ。" * 3000, "x" * 9000]
    corpora.write("alpha", documents * 4)
    chunk_sizes = []
    setting = Setting(corpora, eos, {"alpha": 1.0})
    encode = setting.tokenizer.encode_chunks
    monkeypatch.setattr(document_runs, "CHUNK_BYTES", 500)
    monkeypatch.setattr(
        setting.tokenizer,
        "encode_chunks",
        lambda chunks: chunk_sizes.extend(len(text.encode()) for text in chunks) or encode(chunks),
    )
    rows = setting.run(60)
    for stream in setting.streams:
        fresh = Setting(corpora, eos, {"alpha": 1.0}).streams[stream.index]
        fresh.restore(stream.get_state(), setting.timeline.get_stage(0))
        setting.streams[stream.index] = fresh
    rows = np.concatenate([rows, setting.run(60, 60)], axis=1)
    monkeypatch.setattr(setting.tokenizer, "encode_chunks", encode)
    for number in range(S):
        assert rows[number].tolist() == setting.documents("alpha", number, 3)[: 120 * LENGTH]
    assert {size for size in chunk_sizes if size > 2500} == {9000}  # one word


@pytest.fixture
def with_bos(eos, bos, bos_tokenizer_file) -> Tokenizer:
    return Tokenizer(str(bos_tokenizer_file), ".", eos, bos_token=bos)


@pytest.mark.slow
def test_every_document_starts_with_one_bos(corpora, eos, bos, with_bos, monkeypatch) -> None:
    """Compare with the tokens of whole documents, also after a restart within a chunk."""
    documents = ["short", "", "word (and) more, " * 300, None, "木" * 40, f"{bos} in a text"]
    corpora.write("alpha", documents * 4)
    monkeypatch.setattr(document_runs, "CHUNK_BYTES", 500)
    setting = Setting(corpora, eos, {"alpha": 1.0}, tokenizer=with_bos)
    rows = [setting.run(31)]
    restored = Setting(corpora, eos, {"alpha": 1.0}, tokenizer=with_bos)
    for stream, fresh in zip(setting.streams, restored.streams, strict=True):
        fresh.restore(stream.get_state(), setting.timeline.get_stage(0))
    rows.append(restored.run(31, 31))
    plain = Tokenizer("embedded", ".", eos)
    for number, row in enumerate(np.concatenate(rows, axis=1).tolist()):
        expected: list[int] = []
        for j in range(200):
            source = setting.sources["alpha"]
            text = str(source.read_training_document(j * S + number), "utf-8")
            (ids,) = plain.encode([text])
            expected += [4096, *ids.tolist()] if len(ids) else []
        assert row == expected[: 62 * LENGTH]


def test_bos_precedes_a_first_chunk_without_tokens(corpora, eos, with_bos, monkeypatch) -> None:
    """Use a tokenizer that drops text, such as characters outside its vocabulary."""
    corpora.write("alpha", ["drop " * 10 + "keep " * 10] * 40)
    monkeypatch.setattr(document_runs, "CHUNK_BYTES", 30)
    encode = with_bos.encode_chunks
    monkeypatch.setattr(
        with_bos,
        "encode_chunks",
        lambda chunks: [
            np.empty(0, np.int32) if "drop" in text else ids
            for text, ids in zip(chunks, encode(chunks), strict=True)
        ],
    )
    setting = Setting(corpora, eos, {"alpha": 1.0}, tokenizer=with_bos)
    (row, *_) = setting.run(8).tolist()
    decoded = with_bos.decode(row)
    assert decoded.count("<|begin|> keep") + decoded.count("<|begin|>keep") >= 3
    documents = decoded.split(eos)
    assert all(text.startswith("<|begin|>") for text in documents[:-1])


def test_invalid_utf8_is_replaced_with_one_warning(corpora, eos, caplog) -> None:
    text = pa.array([b"bad \xff byte", b"cut \xe6\x9c"] * 10, pa.binary()).view(pa.string())
    for name in ("a", "b"):
        with pa.OSFile(str(corpora.root / "alpha" / f"{name}.arrow"), "wb") as sink:
            table = pa.table({"text": text})
            with pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
    setting = Setting(corpora, eos, {"alpha": 1.0})
    joined = setting.tokenizer.decode(setting.run(4)[0].tolist())
    assert set(joined.split(eos)[:-1]) == {"bad \ufffd byte", "cut \ufffd"}
    (record,) = caplog.records
    assert record.getMessage().startswith("data.sources.alpha: documents hold bytes that are not")


def test_sources_change_within_a_sequence_only_after_eos(corpora, eos) -> None:
    """Verify an assumption of document ids, which are computed from EOS tokens only."""
    corpora.write("alpha", ["a a a a " * n for n in (3, 50, 2000, 9, 400, 1)] * 4)
    corpora.write("beta", ["b b b b " * n for n in (700, 5, 20, 1000)] * 4)
    setting = Setting(corpora, eos, {"alpha": 1.0, "beta": 1.0})
    batch = setting.run(300).reshape(S * 300, LENGTH)
    letters = set()
    for row in batch:
        for text in setting.tokenizer.decode(row.tolist()).split(eos):
            letters.add("".join(sorted(set(text) - {" "})))
    assert letters == {"", "a", "b"}


@pytest.mark.slow
def test_source_without_tokens_is_an_error(corpora, eos) -> None:
    corpora.write("alpha", [f"some text {i}" for i in range(40)])
    setting = Setting(corpora, eos, {"alpha": 1.0})
    no_tokens = [np.empty(0, np.int32)]
    setting.tokenizer.encode_chunks = lambda chunks: no_tokens * len(chunks)
    with pytest.raises(ConfigError, match=r"data\.sources\.alpha: \d+ documents in a row have no"):
        setting.run(1)
