"""Test random access to rows of many mapped Arrow files, and damaged files."""

import logging
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest

from hlat.config.config_errors import ConfigError
from hlat.data import arrow_dataset, file_content, row_index
from hlat.data.arrow_dataset import MAX_UNREADABLE_FILES, ArrowDataset


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("type_", [pa.string(), pa.large_string()])
def test_rows_are_numbered_across_files_and_batches(
    tmp_path: Path, stream: bool, type_: pa.DataType, write_arrow, make_documents
) -> None:
    texts: list[str | None] = [*make_documents("one", 30), "", None, "ends ✓", None]
    first = write_arrow(tmp_path / "1.arrow", texts[:20], stream=stream, type_=type_)
    none = write_arrow(tmp_path / "2.arrow", [], stream=stream, type_=type_)
    last = write_arrow(tmp_path / "3.arrow", texts[20:], stream=stream, type_=type_)
    corpus = ArrowDataset([first, none, last], "text")
    assert len(corpus) == len(texts)
    assert [corpus.read_text(row) for row in range(len(texts))] == [text or "" for text in texts]
    assert corpus.num_bytes == sum(len((text or "").encode()) for text in texts)


@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
def test_names_that_are_not_utf8(tmp_path: Path, suffix: str, write_arrow) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path / "name-") + b"\xff." + suffix.encode()))
    write_arrow(path, ["one", "two"], compression=None if suffix == "arrow" else "zstd")
    corpus = ArrowDataset([path], "text")
    assert corpus.read_text(1) == "two"
    assert len(corpus.compute_fingerprint()["sha256"]) == 64


def test_nulls_of_a_sliced_array_are_empty(tmp_path: Path) -> None:
    array = pa.array([None, "a", None, "b", *["c"] * 9, None, "d"])[1:]
    batch = pa.record_batch({"text": array})
    path = tmp_path / "x.arrow"
    with path.open("wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)
    corpus = ArrowDataset([path], "text")
    assert [corpus.read_text(i) for i in range(len(corpus))] == [t or "" for t in array.to_pylist()]


@pytest.mark.parametrize("stream", [False, True])
def test_truncated_files_are_errors(
    tmp_path: Path, stream: bool, write_arrow, make_documents
) -> None:
    path = write_arrow(tmp_path / "a.arrow", make_documents("cut", 30), stream=stream)
    content = path.read_bytes()
    for length in (0, 1, 7, 100, len(content) // 2, len(content) - 8, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ConfigError, match=f"{path}: not a whole Arrow or Parquet file"):
            ArrowDataset([path], "text")


def test_garbage_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    for content in (b"hello", random.Random(1).randbytes(5000), b"ARROW1\0\0" * 40):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="not a whole Arrow or Parquet file"):
            ArrowDataset([path], "text")


def test_fingerprint_depends_on_names_documents_and_columns(
    tmp_path: Path, write_arrow, make_documents
) -> None:
    texts = make_documents("print", 12)
    paths = [
        write_arrow(tmp_path / "a" / "1.arrow", texts),
        write_arrow(tmp_path / "b" / "1.arrow", texts),
        write_arrow(tmp_path / "c" / "2.arrow", texts),
        write_arrow(tmp_path / "d" / "1.arrow", [texts[0].upper(), *texts[1:]]),
        write_arrow(tmp_path / "e" / "1.arrow", texts, column="other"),
    ]
    columns = ["text"] * 4 + ["other"]
    prints = [
        ArrowDataset([p], c).compute_fingerprint() for p, c in zip(paths, columns, strict=True)
    ]
    assert prints[0] == prints[1]  # the same files elsewhere
    assert prints[0]["rows"] == 12
    assert len({one["sha256"] for one in prints}) == 4
    pair = [
        ArrowDataset(p, "text").compute_fingerprint() for p in (paths[1:3], [paths[2], paths[1]])
    ]
    assert pair[0] != pair[1]
    cut = write_arrow(tmp_path / "f" / "1.arrow", texts, rows_per_batch=2, compression="zstd")
    assert ArrowDataset([cut], "text").compute_fingerprint() == prints[0]


def test_a_document_is_a_view_of_the_file(tmp_path: Path, write_arrow) -> None:
    giant = "木" * (50 << 20 >> 2)
    path = write_arrow(tmp_path / "a.arrow", ["a", giant, None, ""], type_=pa.large_string())
    corpus = ArrowDataset([path], "text")
    document = corpus.read_document(1)
    assert (document.readonly, document.format, len(document)) == (True, "B", len(giant.encode()))
    assert document == giant.encode()
    assert [bytes(corpus.read_document(row)) for row in (0, 2, 3)] == [b"a", b"", b""]


def test_invalid_utf8_is_returned_as_bytes(tmp_path: Path, write_arrow) -> None:
    path = write_arrow(tmp_path / "a.arrow", ["abcdefgh"])
    path.write_bytes(path.read_bytes().replace(b"abcdefgh", b"abc\xffefgh"))
    corpus = ArrowDataset([path], "text")
    assert bytes(corpus.read_document(0)) == b"abc\xffefgh"
    assert corpus.read_text(0) == "abc\ufffdefgh"


@pytest.mark.parametrize("documents", [[], [None, None], ["", None, ""]])
def test_empty_documents_are_counted_as_rows(tmp_path: Path, documents, write_arrow) -> None:
    for stream in (False, True):
        path = write_arrow(tmp_path / f"{stream}.arrow", documents, stream=stream)
        for _ in range(2):  # scanned, and from the cache
            corpus = ArrowDataset([path], "text")
            assert (len(corpus), corpus.num_bytes) == (len(documents), 0)
            assert [corpus.read_text(row) for row in range(len(documents))] == [""] * len(documents)
    assert len(ArrowDataset([], "text")) == 0


def test_files_of_a_source_may_have_different_other_columns(tmp_path: Path, write_arrow) -> None:
    one = write_arrow(tmp_path / "1.arrow", ["a"])
    table = pa.table({"text": pa.array(["b"], pa.large_string()), "url": ["u"]})
    two = tmp_path / "2.arrow"
    with two.open("wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    corpus = ArrowDataset([one, two], "text")
    assert [corpus.read_text(0), corpus.read_text(1)] == ["a", "b"]
    with pytest.raises(ConfigError) as error:
        ArrowDataset([one, two], "url")
    assert error.value.problems == (
        f"data.text_column=url: {one} has no column of this name; it has number (int64), text "
        "(string); set it, or text_column of this source alone, to one of: text",
    )


def test_first_unreadable_files_are_listed(tmp_path: Path, write_arrow) -> None:
    paths = [write_arrow(tmp_path / f"{i}.arrow", ["x"], column="body") for i in range(9)]
    with pytest.raises(ConfigError) as error:
        ArrowDataset(paths, "text", "data.sources.a.text_column")
    assert len(error.value.problems) == MAX_UNREADABLE_FILES
    assert error.value.problems[1] == (
        f"data.sources.a.text_column=text: {paths[1]} has no column of this name; it has number "
        "(int64), body (string); set it to one of: body"
    )


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"no\.arrow: not a whole Arrow or Parquet file \(.*No such"
    ):
        ArrowDataset([tmp_path / "no.arrow"], "text")


def write_offsets(path: Path, change: dict[int, int]) -> None:
    """Overwrite offsets of the file's first batch in place."""
    (entry, *_) = row_index.build_row_index(path, "text")
    content = bytearray(path.read_bytes())
    for row, offset in change.items():
        start = int(entry["offsets"]) + row * int(entry["width"])
        content[start : start + 4] = offset.to_bytes(4, "little", signed=True)
    path.write_bytes(content)


def test_rows_outside_of_their_buffer_are_empty_with_one_warning(
    tmp_path: Path, write_arrow, caplog
) -> None:
    paths = [write_arrow(tmp_path / f"{i}.arrow", ["one", "two", "three", "four"]) for i in (1, 2)]
    write_offsets(paths[1], {1: 1 << 30, 3: -5})
    corpus = ArrowDataset(paths, "text")
    with caplog.at_level(logging.WARNING, "hlat.data"):
        texts = [corpus.read_text(row) for row in range(8)]
    assert texts == ["one", "two", "three", "four", "", "", "", ""]
    (record,) = caplog.records
    assert record.getMessage().startswith(
        f"{paths[1]} is damaged: row 0 lies outside of its buffer"
    )


def change_file(path: Path, change: str) -> str:
    """Change a file and return the reason in the expected error."""
    content, times = path.read_bytes(), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    if change == "truncate":
        os.truncate(path, 100)
        return f"it has 100 bytes instead of {len(content):,}"
    if change == "remove":
        path.unlink()
        return "No such file or directory"
    if change == "zero":
        with path.open("r+b") as file:
            file.write(bytes(len(content)))
        return "it was modified at "
    path.unlink()  # the mapped file still exists
    path.write_bytes(content.replace(b"x", b"y"))
    if change == "replace":
        return "it was modified at "
    os.utime(path, ns=times)
    return "its bytes from "


CHANGES = ["truncate", "remove", "zero", "replace", "replace with the same time"]


@pytest.mark.parametrize("change", CHANGES)
def test_files_that_change_during_a_run_are_an_error(
    tmp_path: Path, write_arrow, change: str
) -> None:
    """Reading a mapped page behind the end of a truncated file would kill the process."""
    paths = [write_arrow(tmp_path / f"{i}.arrow", ["x" * 9000] * 9) for i in range(3)]
    corpus = ArrowDataset(paths, "text")
    expected = [bytes(corpus.read_document(row)) for row in range(27)]
    corpus.validate_content()
    time.sleep(2 * file_content.STATUS_INTERVAL_S)
    message = f"{paths[1]} has changed since the run opened it ({change_file(paths[1], change)}"
    assert [corpus.read_document(row) for row in range(9)] == expected[:9]
    if change != "replace with the same time":
        with pytest.raises(ConfigError) as error:
            corpus.read_document(17)
        assert str(error.value).startswith(message)
    with pytest.raises(ConfigError) as error:
        corpus.validate_content()
    assert str(error.value).startswith(message)
    assert str(error.value).endswith("); restore it, and run the same command again")
    corpus.validate_content(shard=0, num_shards=3)


def test_each_check_compares_other_documents(tmp_path: Path, write_arrow, monkeypatch) -> None:
    monkeypatch.setattr(arrow_dataset, "MAX_CHECKED_DOCUMENTS", 3)
    path = write_arrow(tmp_path / "a.arrow", [f"document {i}" for i in range(9)])
    corpus = ArrowDataset([path], "text")
    assert [corpus.read_text(row) for row in range(9)] == [f"document {i}" for i in range(9)]
    content, times = path.read_bytes(), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    path.write_bytes(content.replace(b"document 7", b"document X"))
    os.utime(path, ns=times)
    corpus.validate_content()
    corpus.validate_content()
    with pytest.raises(ConfigError, match="its bytes from"):
        corpus.validate_content()


@pytest.mark.slow
def test_more_files_than_may_be_open(tmp_path: Path, write_arrow) -> None:
    first = write_arrow(tmp_path / "0.arrow", ["text"] * 3)
    for number in range(1, 200):
        os.link(first, tmp_path / f"{number}.arrow")
    code = (
        "import resource, sys; from pathlib import Path; from hlat.data.arrow_dataset import ArrowDataset\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
        "for _ in range(2):\n"
        "    corpus = ArrowDataset(sorted(Path(sys.argv[1]).iterdir()), 'text')\n"
        "    print(sum(len(corpus.read_document(row)) for row in range(len(corpus))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("2400\n2400\n", "")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("compression", [None, "lz4"])
@pytest.mark.slow_after(2)
def test_damaged_files_are_rejected_or_read_within_their_bounds(
    tmp_path: Path, stream: bool, compression: str | None, write_arrow, make_documents
) -> None:
    path = tmp_path / "a.arrow"
    texts: list[str | None] = [None, "", *make_documents("damage", 40)]
    write_arrow(path, texts, stream=stream, compression=compression)
    content, rng = path.read_bytes(), random.Random(f"{stream} {compression}")
    index = save_sidecar(path) if compression is None else b""
    for trial in range(250):
        path.write_bytes(damage_bytes(content, rng))
        if index and trial % 2:
            row_index.get_sidecar_path(path).write_bytes(
                damage_bytes(index, rng) if trial % 4 == 1 else index
            )
        else:
            row_index.get_sidecar_path(path).unlink(missing_ok=True)
        try:
            corpus = ArrowDataset([path], "text")
            for row in range(len(corpus)):
                corpus.read_text(row)
        except ConfigError as error:
            assert "a.arrow" in str(error)  # noqa: PT017 - most changes remain readable


def save_sidecar(path: Path) -> bytes:
    row_index.save_row_index(row_index.build_row_index(path, "text"), path, "text")
    return row_index.get_sidecar_path(path).read_bytes()


def damage_bytes(content: bytes, rng: random.Random) -> bytes:
    """Return a copy with flipped, overwritten or truncated bytes."""
    damaged = bytearray(content if rng.random() < 0.8 else content[: rng.randrange(len(content))])
    for _ in range(rng.choice([1, 1, 1, 5, 30]) if damaged else 0):
        position = rng.randrange(len(damaged))
        damaged[position] = rng.choice([damaged[position] ^ 1 << rng.randrange(8), 0, 255])
    return bytes(damaged)
