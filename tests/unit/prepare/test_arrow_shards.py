"""Shards end at their limits, contain the written documents, and can be memory-mapped."""

import errno
import hashlib
from pathlib import Path

import pyarrow as pa
import pytest

from hlat.data.arrow_dataset import ArrowDataset
from hlat.prepare import arrow_shards


@pytest.fixture(autouse=True)
def _set_small_limits(monkeypatch) -> None:
    monkeypatch.setattr(arrow_shards, "BATCH_ROWS", 10)
    monkeypatch.setattr(arrow_shards, "BATCH_BYTES", 1000)
    monkeypatch.setattr(arrow_shards, "SHARD_BYTES", 3000)


def _write(folder: Path, documents: list[bytes]) -> list[arrow_shards.ShardRecord]:
    folder.mkdir()
    writer = arrow_shards.ArrowShardWriter(folder)
    for text in documents:
        writer.add(text)
    return writer.finish()


def _batches(path: Path) -> list[list[int]]:
    with pa.ipc.open_file(str(path)) as reader:
        batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
    return [[len(text) for text in batch["text"].to_pylist()] for batch in batches]


def test_batches_are_limited_by_rows_and_bytes(tmp_path: Path) -> None:
    lengths = [1] * 12 + [600, 300, 300, 5000, 2]
    (first, second) = _write(tmp_path / "a", [b"x" * n for n in lengths])
    assert _batches(tmp_path / "a" / first.name) == [[1] * 10, [1, 1, 600, 300], [300], [5000]]
    assert _batches(tmp_path / "a" / second.name) == [[2]]
    assert (first.rows, first.text_bytes, first.longest_bytes) == (16, 6212, 5000)
    assert (second.name, second.rows) == ("part-00001.arrow", 1)


def test_documents_round_trip(tmp_path: Path, make_documents) -> None:
    documents = make_documents("written", 200)
    parts = _write(tmp_path / "a", [text.encode() for text in documents])
    paths = [tmp_path / "a" / part.name for part in parts]
    assert len(parts) > 5
    corpus = ArrowDataset(paths, "text")
    assert [corpus.read_text(row) for row in range(len(corpus))] == documents
    for path, part in zip(paths, parts, strict=True):
        assert path.stat().st_size == part.bytes
        assert hashlib.sha256(path.read_bytes()).hexdigest() == part.sha256
    assert [p.sha256 for p in _write(tmp_path / "b", [t.encode() for t in documents])] == [
        part.sha256 for part in parts
    ]


def test_no_documents_create_no_shards(tmp_path: Path) -> None:
    assert _write(tmp_path / "a", []) == []


def test_error_of_a_full_disk_contains_the_file(monkeypatch, tmp_path: Path) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(arrow_shards.io, "FileIO", lambda *_: full)
        writer = arrow_shards.ArrowShardWriter(tmp_path)
        writer.add(b"x" * 100)
        with pytest.raises(OSError, match="No space left") as error:
            writer.finish()
        writer.close_unfinished()
    assert error.value.errno == errno.ENOSPC
    assert error.value.filename == str(tmp_path / "part-00000.arrow")
