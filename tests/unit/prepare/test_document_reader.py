"""Documents of every file format, and locations and reasons of damaged ones."""

import bz2
import gzip
import json
import lzma
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hlat.config.config_errors import ConfigError
from hlat.prepare import document_reader
from hlat.prepare.document_reader import DamagedDocument
from hlat.prepare.input_files import InputReader

TEXTS = [f'document {i}: été 木 \u2028 \x00 \\ "' + "x" * (i * 97 % 5000) for i in range(700)]


def _zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


COMPRESS = {
    "": lambda content: content,
    ".gz": gzip.compress,
    ".zst": _zstd,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def _lines(documents: list[str], ascii_: bool = True) -> bytes:
    rows = [json.dumps({"meta": {"n": 1}, "text": text}, ensure_ascii=ascii_) for text in documents]
    return "\n".join(rows).encode() + b"\n"


def _read(path: Path, column: str = "text") -> list[bytes | DamagedDocument]:
    with InputReader(str(path)) as reader:
        return list(document_reader.parse_documents(reader, str(path), column))


def _read_documents(path: Path, column: str = "text") -> list[str]:
    return [one.decode() for one in _read(path, column) if isinstance(one, bytes)]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_json_lines_of_every_compression(tmp_path: Path, suffix: str) -> None:
    compress, half = COMPRESS[suffix], len(TEXTS) // 2
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(compress(_lines(TEXTS, ascii_=False)))
    assert _read_documents(path) == TEXTS
    several = [
        _lines(TEXTS[:3]),
        _lines(TEXTS[3:half])[:-9],
        _lines(TEXTS[3:half])[-9:],
        _lines(TEXTS[half:]),
    ]
    path.write_bytes(b"".join(map(compress, several)))
    assert _read_documents(path) == TEXTS


def test_blank_lines_crlf_and_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.ndjson"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b"}')
    assert _read_documents(path) == ["a", "b"]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_text_file_is_one_document(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.md{suffix}"
    path.write_bytes(COMPRESS[suffix](b"\xef\xbb\xbf# Title\r\n\n  text\n"))
    assert _read_documents(path) == ["# Title\r\n\n  text\n"]
    path.write_bytes(COMPRESS[suffix](b" \n"))
    assert _read(path) == [b""]
    path.write_bytes(COMPRESS[suffix](b"caf\xe9"))
    (damaged,) = _read(path)
    assert damaged == DamagedDocument("document 1", "is not UTF-8 (byte 0xe9 at position 3)")


def test_separated_documents_equal_those_of_split() -> None:
    """Vary the position of separators relative to blocks."""
    random_ = random.Random(0)
    for separator in (b"\n", b"ab", b"aab", b"aaa"):
        for _ in range(200):
            content = bytes(random_.choices(b"ab\n", k=random_.randrange(40)))
            size = random_.randrange(1, 9)
            blocks = (content[i : i + size] for i in range(0, len(content), size))
            assert [*document_reader._split(blocks, separator)] == content.split(separator)


@pytest.mark.parametrize("suffix", [one for one in COMPRESS if one])
def test_compressed_parquet_is_read(tmp_path: Path, suffix: str) -> None:
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "a.parquet")
    path = tmp_path / f"b.parquet{suffix}"
    path.write_bytes(COMPRESS[suffix]((tmp_path / "a.parquet").read_bytes()))
    assert _read_documents(path) == ["a", "b"]
    path.write_bytes(path.read_bytes()[:-20])
    assert all(isinstance(one, DamagedDocument) for one in _read(path))


def test_a_text_above_the_limit_is_damaged(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(document_reader, "MAX_LINE_BYTES", 100)
    path = tmp_path / "a.txt"
    path.write_text("x" * 101)
    (damaged,) = _read(path)
    assert "divide the text into documents with separator=" in damaged.reason


@pytest.mark.slow
def test_a_document_of_50_megabytes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    text = "0123456789" * 5_000_000
    path.write_bytes(_zstd(_lines(["before", text, "after"])))
    assert _read_documents(path) == ["before", text, "after"]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_line_above_the_limit_is_damaged_and_not_stored_in_memory(
    tmp_path: Path, suffix: str, monkeypatch
) -> None:
    """Require detection before the end of the line, which may be far away."""
    monkeypatch.setattr(document_reader, "MAX_LINE_BYTES", 3 << 20)
    path, lines = (
        tmp_path / f"a.jsonl{suffix}",
        ["before", "x" * (8 << 20), "after", "y" * (4 << 20)],
    )
    path.write_bytes(COMPRESS[suffix](_lines(lines)))
    first, damage, third, last = _read(path)
    assert (first, third) == (b"before", b"after")
    for document, line in ((damage, 2), (last, 4)):
        assert isinstance(document, DamagedDocument)
        assert document.location == f"line {line}"
        assert document.reason.startswith("is longer than ")
    with InputReader(str(path)) as reader:
        documents = document_reader.parse_documents(reader, str(path), "text")
        assert [next(documents), next(documents)] == [first, damage]
        assert suffix or reader.num_bytes_read <= 5 << 20


def test_a_line_with_millions_of_lists_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    count = document_reader.MAX_LINE_VALUES
    path.write_bytes(b'{"text": "a", "x": [' + b"[]," * count + b"[]]}\n")
    (damage,) = _read(path)
    assert damage == DamagedDocument("line 1", f"has more than {count:,} lists and objects")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a"', "is not JSON"),
        (b"hello", "is not JSON (Expecting value: line 1 column 1 (char 0))"),
        (b"[" * 100_000, "is not JSON"),
        (b'["a"]', "is a list, not an object"),
        (b"12", "is a number, not an object"),
        (b"null", "is null, not an object"),
        (b'{"content": "a", "url": 1}', "has no field 'text' (text_column=); it has content, url"),
        (b'{"text": 12}', "has a number in 'text', not a string"),
        (b'{"text": ["a"]}', "has a list in 'text', not a string"),
        (b'{"text": "a\xff"}', "is not UTF-8 (byte 0xff at position 11)"),
        (b'{"text": "ab\\ud800"}', "has half of a surrogate pair ('\\ud800' at character 2)"),
    ],
)
def test_damaged_lines_have_a_location_and_reason(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"text": "one"}\n' + line + b'\n{"text": null}\n{"text": "\\ud83d\\ude00"}\n'
    )
    one, damage, empty, pair = _read(path)
    assert (one, empty, pair) == (b"one", b"", "😀".encode())
    assert isinstance(damage, DamagedDocument)
    assert damage.location == "line 2"
    assert damage.reason.startswith(reason)


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2"])
def test_documents_before_a_truncation_are_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    rng = random.Random(1)
    documents = [rng.randbytes(1500).hex() for _ in range(1500)]
    content = COMPRESS[suffix](_lines(documents))
    for length in (len(content) - 1, len(content) // 2, 5, 0):
        path.write_bytes(content[:length])
        *before, damage = _read(path)
        assert isinstance(damage, DamagedDocument)
        assert damage.location == f"after line {len(before)}"
        assert damage.reason.startswith("the rest is truncated or damaged (")
        assert before == [text.encode() for text in documents[: len(before)]]
    path.write_bytes(content[: len(content) // 2])
    assert len(_read(path)) > 250


@pytest.mark.parametrize(
    "type_", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
)
def test_parquet_and_arrow_of_every_type_and_compression(
    tmp_path: Path, type_: pa.DataType
) -> None:
    array = pa.array([*TEXTS, None, ""], pa.string()).cast(type_)
    table = pa.table({"number": range(len(array)), "body": array})
    paths = [tmp_path / "a.parquet"]
    pq.write_table(table, paths[0], row_group_size=300)
    for new in (pa.ipc.new_file, pa.ipc.new_stream):
        for compression in (None, "zstd", "lz4"):
            paths.append(tmp_path / f"{new.__name__}-{compression}.arrow")
            options = pa.ipc.IpcWriteOptions(compression=compression)
            with paths[-1].open("wb") as file, new(file, table.schema, options=options) as writer:
                writer.write_table(table, max_chunksize=97)
    for path in paths:
        assert _read_documents(path, "body") == [*TEXTS, "", ""], path.name


def test_rows_with_invalid_utf8_have_a_location(tmp_path: Path) -> None:
    bad = pa.array([b"good", b"a\xff", b"", None]).cast(pa.binary())
    array = pa.StringArray.from_buffers(4, bad.buffers()[1], bad.buffers()[2], bad.buffers()[0])
    pq.write_table(pa.table({"text": array}), tmp_path / "a.parquet")
    assert _read(tmp_path / "a.parquet") == [
        b"good",
        DamagedDocument("row 1", "is not UTF-8 (byte 0xff at position 1)"),
        b"",
        b"",
    ]


def test_missing_and_non_text_columns_are_rejected(tmp_path: Path) -> None:
    table = pa.table({"id": [1], "content": ["a"], "raw": [b"a"]})
    pq.write_table(table, tmp_path / "a.parquet")
    with (tmp_path / "a.arrow").open("wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        with pytest.raises(
            ConfigError,
            match=r"text_column=text: .* has no column of this name; .* one of: content",
        ):
            _read(tmp_path / name)
        with pytest.raises(
            ConfigError, match=f"text_column=raw: this column of .*{name} is binary"
        ):
            _read(tmp_path / name, "raw")


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow", "stream.arrow"])
def test_truncated_and_damaged_files_are_errors_with_their_name(
    tmp_path: Path, name: str, write_arrow, make_documents
) -> None:
    documents, path = make_documents("cut", 60), tmp_path / name
    if name == "a.parquet":
        pq.write_table(pa.table({"text": documents}), path)
    else:
        write_arrow(path, documents, stream=name.startswith("stream"))
    content, rng = path.read_bytes(), random.Random(3)
    for length in (0, 3, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        assert isinstance(_read(path)[-1], DamagedDocument), length
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(rng.choice([1, 5, 30])):
            damaged[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            _read(path)
        except ConfigError as error:
            assert name in str(error)  # noqa: PT017 - most flips remain readable


def test_read_errors_are_not_damaged_documents(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(_lines(TEXTS)))

    class Failing:
        def read(self, *_: object) -> bytes:
            raise OSError(5, "Input/output error")

        def close(self) -> None:
            pass

    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.open", lambda *_: Failing())
    with pytest.raises(ConfigError, match=r"a.jsonl.gz: cannot be read \(Input/output error\)"):
        _read(path)
