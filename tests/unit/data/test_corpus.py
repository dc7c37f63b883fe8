"""Rows of many Arrow files are slices of mapped buffers, and damaged files say so."""

import random
from pathlib import Path

import pyarrow as pa
import pytest

from hlat.config.errors import ConfigError
from hlat.data.corpus import Corpus, find_files


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("type_", [pa.string(), pa.large_string()])
def test_rows_run_over_all_files_and_batches(
    tmp_path: Path, stream: bool, type_: pa.DataType, write_arrow, make_texts
) -> None:
    texts: list[str | None] = [*make_texts("one", 30), "", None, "ends ✓", None]
    first = write_arrow(tmp_path / "1.arrow", texts[:20], stream=stream, type_=type_)
    none = write_arrow(tmp_path / "2.arrow", [], stream=stream, type_=type_)
    last = write_arrow(tmp_path / "3.arrow", texts[20:], stream=stream, type_=type_)
    corpus = Corpus([first, none, last], "text")
    assert len(corpus) == len(texts)
    assert [corpus.text(row) for row in range(len(texts))] == [text or "" for text in texts]
    assert corpus.num_bytes == sum(len((text or "").encode()) for text in texts)


def test_nulls_of_a_sliced_array_are_empty(tmp_path: Path) -> None:
    array = pa.array([None, "a", None, "b", *["c"] * 9, None, "d"])[1:]
    batch = pa.record_batch({"text": array})
    path = tmp_path / "x.arrow"
    with path.open("wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)
    corpus = Corpus([path], "text")
    assert [corpus.text(i) for i in range(len(corpus))] == [t or "" for t in array.to_pylist()]


def test_files_are_found_once_and_in_order(tmp_path: Path, write_arrow) -> None:
    for name in ("b/2.arrow", "b/1.arrow", "b/notes.txt", "a.arrow", "c/d/3.arrow"):
        write_arrow(tmp_path / name, ["x"])
    patterns = ["b", "a.arrow", "b/*.arrow", "c/**/*.arrow", str(tmp_path / "a.arrow")]
    found = find_files("key", str(tmp_path), patterns)
    names = [path.relative_to(tmp_path).as_posix() for path in found]
    assert names == ["a.arrow", "b/1.arrow", "b/2.arrow", "c/d/3.arrow"]


@pytest.mark.parametrize("pattern", ["no.arrow", "*.feather", "empty"])
def test_a_pattern_without_files_is_an_error(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no file matches") as error:
        find_files("data.sources.code.paths", str(tmp_path), [pattern])
    assert str(error.value).startswith(f"data.sources.code.paths: no file matches '{tmp_path}/")
    assert "set data.root or the paths of this source" in str(error.value)


def test_no_patterns_and_unknown_embedded_sources_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"data\.sources\.x\.paths: is empty"):
        find_files("data.sources.x.paths", ".", [])
    with pytest.raises(ConfigError, match="no embedded:poems; use one of embedded:code"):
        find_files("data.sources.x.paths", ".", ["embedded:poems"])


def test_a_missing_column_names_those_that_would_do(tmp_path: Path, write_arrow) -> None:
    path = write_arrow(tmp_path / "a.arrow", ["x"], column="content")
    with pytest.raises(ConfigError) as error:
        Corpus([path], "text")
    assert str(error.value) == (
        f"data.text_column=text: {path} has no column of this name; it has number (int64), "
        "content (string); set data.text_column to one of: content"
    )


def test_a_column_of_another_type_is_an_error(tmp_path: Path, write_arrow) -> None:
    path = write_arrow(tmp_path / "a.arrow", ["x"])
    with pytest.raises(ConfigError, match="is int64, not string or large_string"):
        Corpus([path], "number")


@pytest.mark.parametrize("stream", [False, True])
def test_truncated_files_are_errors(tmp_path: Path, stream: bool, write_arrow, make_texts) -> None:
    path = write_arrow(tmp_path / "a.arrow", make_texts("cut", 30), stream=stream)
    whole = path.read_bytes()
    for length in (0, 1, 7, 100, len(whole) // 2, len(whole) - 8, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=f"{path}: not a whole Arrow IPC file"):
            Corpus([path], "text")


def test_garbage_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    for content in (b"hello", random.Random(1).randbytes(5000), b"ARROW1\0\0" * 40):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="not a whole Arrow IPC file"):
            Corpus([path], "text")


def test_compressed_files_are_refused(tmp_path: Path, write_arrow) -> None:
    path = write_arrow(tmp_path / "a.arrow", ["x" * 1000] * 10, compression="zstd")
    with pytest.raises(ConfigError, match="compressed and cannot be mapped"):
        Corpus([path], "text")


@pytest.mark.parametrize("stream", [False, True])
def test_flipped_bytes_never_read_outside_of_the_file(
    tmp_path: Path, stream: bool, write_arrow, make_texts
) -> None:
    path = write_arrow(tmp_path / "a.arrow", make_texts("flip", 40), stream=stream)
    whole, dice = path.read_bytes(), random.Random(2)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(dice.choice([1, 1, 5, 30])):
            damaged[dice.randrange(len(whole))] ^= 1 << dice.randrange(8)
        path.write_bytes(damaged)
        try:
            corpus = Corpus([path], "text")
            for row in range(len(corpus)):
                corpus.text(row)
        except ConfigError as error:
            assert "a.arrow" in str(error)  # noqa: PT017 - most flips only change a letter


def test_text_that_is_not_utf8_is_an_error(tmp_path: Path, write_arrow) -> None:
    path = write_arrow(tmp_path / "a.arrow", ["abcdefgh"])
    path.write_bytes(path.read_bytes().replace(b"abcdefgh", b"abc\xffefgh"))
    with pytest.raises(ConfigError, match="not UTF-8"):
        Corpus([path], "text").text(0)


def test_fingerprint_notices_what_changes_the_documents(
    tmp_path: Path, write_arrow, make_texts
) -> None:
    texts = make_texts("print", 12)
    paths = [
        write_arrow(tmp_path / "a" / "1.arrow", texts),
        write_arrow(tmp_path / "b" / "1.arrow", texts),
        write_arrow(tmp_path / "c" / "2.arrow", texts),
        write_arrow(tmp_path / "d" / "1.arrow", [texts[0].upper(), *texts[1:]]),
        write_arrow(tmp_path / "e" / "1.arrow", texts, column="other"),
    ]
    columns = ["text"] * 4 + ["other"]
    prints = [Corpus([p], c).fingerprint() for p, c in zip(paths, columns, strict=True)]
    assert prints[0] == prints[1]  # the same files elsewhere
    assert prints[0]["rows"] == 12
    assert len({one["sha256"] for one in prints}) == 4
    pair = [Corpus(p, "text").fingerprint() for p in (paths[1:3], [paths[2], paths[1]])]
    assert pair[0] != pair[1]
