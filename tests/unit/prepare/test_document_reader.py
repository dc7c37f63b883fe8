"""Documents of every file format, and locations and reasons of damaged ones."""

import bz2
import codecs
import gzip
import json
import lzma
import random
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hlat.config.config_errors import ConfigError
from hlat.data.arrow_dataset import ArrowDataset
from hlat.prepare import document_reader, json_documents, text_blocks
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


def _read(
    path: Path, column: str = "text", encoding: str | None = None
) -> list[bytes | DamagedDocument]:
    with InputReader(str(path)) as reader:
        return list(document_reader.parse_documents(reader, str(path), column, encoding=encoding))


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
    assert isinstance(damaged, DamagedDocument)
    assert (damaged.location, damaged.num_bytes) == ("document 1", 4)
    assert damaged.category == "is not UTF-8; set encoding=, such as windows-1252, if it is text"
    assert damaged.reason == f"{damaged.category} (byte 0xe9 at position 3)"


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
    damaged, rest = _read(path)
    assert "divide the text into documents with separator=" in damaged.reason
    assert (damaged.num_bytes, damaged.num_documents) == (100, 1)
    assert (rest.num_bytes, rest.num_documents) == (1, 0)


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
    first, *long, third, last, rest = _read(path)
    assert (first, third) == (b"before", b"after")
    damage, _ = long
    num_bytes = [len(json.dumps({"meta": {"n": 1}, "text": text})) for text in lines]
    for parts, line in ((long, 2), ([last, rest], 4)):
        assert {one.location for one in parts} == {f"line {line}"}
        assert all(one.reason.startswith("is longer than ") for one in parts)
        assert [one.num_documents for one in parts] == [1, 0]
        assert sum(one.num_bytes for one in parts) == num_bytes[line - 1]
    with InputReader(str(path)) as reader:
        documents = document_reader.parse_documents(reader, str(path), "text")
        assert [next(documents), next(documents)] == [first, damage]
        assert suffix or reader.num_bytes_read <= 5 << 20


def test_a_line_with_millions_of_lists_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    count = json_documents.MAX_VALUES
    path.write_bytes(b'{"text": "a", "x": [' + b"[]," * count + b"[]]}\n")
    (damage,) = _read(path)
    assert isinstance(damage, DamagedDocument)
    assert damage.reason == f"has more than {count:,} lists and objects"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a"', "is not JSON"),
        (b"hello", "is not JSON (Expecting value: line 1 column 1 (char 0))"),
        (b"[" * 100_000, "is not JSON"),
        (b'["a"]', "is a list, not an object"),
        (b"12", "is a number, not an object"),
        (b"null", "is null, not an object"),
        (
            b'{"content": "a", "url": 1}',
            "has no field 'text' (set text_column= to one of: content, url)",
        ),
        (b'{"text": 12}', "has a number in 'text', not a string"),
        (b'{"text": ["a", 1]}', "has a list in 'text', not a string"),
        (
            b'{"text": "a\xff"}',
            "is not UTF-8; set encoding=, such as windows-1252, if it is text (",
        ),
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
@pytest.mark.slow_after(1)
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


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_documents_before_damage_are_read(tmp_path: Path, suffix: str) -> None:
    """Damage the middle of a file that is smaller than the first read."""
    path = tmp_path / f"a.jsonl{suffix}"
    rng = random.Random(1)
    documents = [rng.randbytes(50).hex() for _ in range(300)]
    content = bytearray(COMPRESS[suffix](_lines(documents)))
    half = len(content) // 2
    content[half : half + 200] = b"\xff" * 200
    path.write_bytes(content)
    read = [one for one in _read(path) if isinstance(one, bytes)]
    assert read == [text.encode() for text in documents[: len(read)]]
    assert 135 < len(read) < 160
    damages = [one for one in _read(path) if isinstance(one, DamagedDocument)]
    assert sum(one.num_bytes for one in damages) > 0.9 * half


def test_a_damaged_xz_stream_after_another_is_not_ignored(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.xz"
    second = bytearray(lzma.compress(_lines(["b"] * 100)))
    second[0] ^= 1
    path.write_bytes(lzma.compress(_lines(["a"])) + bytes(8) + second)
    text, damage = _read(path)
    assert text == b"a"
    assert isinstance(damage, DamagedDocument)
    assert damage.num_bytes == pytest.approx(len(second), abs=16)


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
        DamagedDocument("row 1", "is not UTF-8 (byte 0xff at position 1)", num_bytes=2),
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
        def seek(self, *_: object) -> int:
            return 0

        def read(self, *_: object) -> bytes:
            raise OSError(5, "Input/output error")

        def close(self) -> None:
            pass

    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.open", lambda *_: Failing())
    with pytest.raises(ConfigError, match=r"a.jsonl.gz: cannot be read \(Input/output error\)"):
        _read(path)


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF16_LE, codecs.BOM_UTF32_BE])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize(
    "text", ["Plain text.\nSecond line\n", "日本語の文章です。\n漢字と仮名。\n"]
)
def test_utf16_and_utf32_are_recognized(
    tmp_path: Path, text: str, encoding: str, mark: bytes
) -> None:
    path, mark = tmp_path / "a.txt", mark and "\ufeff".encode(encoding)
    path.write_bytes(mark + text.encode(encoding))
    encodings: Counter[str] = Counter()
    with InputReader(str(path)) as reader:
        found = list(
            document_reader.parse_documents(reader, str(path), "text", encodings=encodings)
        )
    assert found == [text.encode()]
    assert encodings == {encoding: 1}
    rows = _lines([text, text], ascii_=False).decode()
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(mark + rows.encode(encoding)))
    assert _read(tmp_path / "b.jsonl.gz") == [text.encode()] * 2


def test_damaged_utf16_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("text ".encode("utf-16-le") * 5000 + b"\x00\xd8" + b"\n\x00" * 40)
    text, damage = _read(path)
    assert text == b"text " * 5000
    assert isinstance(damage, DamagedDocument)
    assert "is not utf-16-le" in damage.reason
    assert damage.num_bytes == 82


@pytest.mark.parametrize("content", [b"abcd\0efgh", b"some words\0\n", b"name\0value"])
def test_text_with_a_null_byte_is_not_utf16(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    assert _read(path) == [DamagedDocument("at its start", "is not text", len(content))]


def test_other_encodings_are_converted_only_on_request(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        _lines(["é", "caf\xe9 \u2019"], ascii_=False)[:-30] + b'\n{"text": "\x92\xe9"}\n'
    )
    text = "caf\xe9 \u2019"
    (tmp_path / "b.txt").write_bytes(text.encode("cp1252"))
    assert _read(tmp_path / "b.txt", encoding="cp1252") == [text.encode()]
    assert _read(path, encoding="cp1252")[-1] == "\u2019é".encode()
    (tmp_path / "b.txt").write_bytes(b"\x81\xff")
    (damage,) = _read(tmp_path / "b.txt", encoding="cp1252")
    assert isinstance(damage, DamagedDocument)
    assert damage.category == "is neither UTF-8 nor cp1252"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("changelog.gz", gzip.compress(b"hlat (1.0)\n\n  * First.\n")),
        ("ls.1.gz", gzip.compress(b".TH LS 1\n")),
        ("wrong.gz", b"not compressed\n"),
        ("compressed.txt", bz2.compress(b"text")),
        ("copyright", b"Format: {1}\n"),
    ],
    ids=["changelog", "man page", "not gzip", "bzip2", "no suffix"],  # gzip stores the time
)
def test_text_is_recognized_by_its_content(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    expected = {".gz": gzip.decompress, ".txt": bz2.decompress}.get(Path(name).suffix)
    is_compressed = expected is not None and name != "wrong.gz"
    assert _read(tmp_path / name) == [expected(content) if is_compressed else content]


def test_binary_files_are_one_damaged_document(tmp_path: Path) -> None:
    for name in ("a.txt", "b.jsonl", "c.md.gz"):
        content = b"\x89PNG\r\n\x1a\n\x00" + bytes(range(256))
        path = tmp_path / name
        path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
        (damage,) = _read(path)
        assert damage == DamagedDocument("at its start", "is not text", path.stat().st_size)


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("block_bytes", [7, 1 << 20])
def test_json_documents_of_several_lines(
    tmp_path: Path, suffix: str, block_bytes: int, monkeypatch
) -> None:
    monkeypatch.setattr(text_blocks, "BLOCK_BYTES", block_bytes)
    rows = [{"text": text, "meta": {"body": [text, "x"]}} for text in ("a [", "é, ]", "} 木")]
    contents = {
        "array": json.dumps(rows, indent=1),
        "line": json.dumps(rows, ensure_ascii=False),
        "objects": "\n".join(json.dumps(row, indent=4) for row in rows),
        "lines": "\n".join(map(json.dumps, rows)),
    }
    for name, content in contents.items():
        path = tmp_path / f"{name}.json{suffix}"
        path.write_bytes(COMPRESS[suffix](content.encode()))
        assert _read_documents(path) == [row["text"] for row in rows], name
        assert _read_documents(path, "meta.body") == [f"{row['text']}\nx" for row in rows], name


@pytest.mark.parametrize(
    ("content", "num_read", "reason"),
    [
        ('[{"text": "a"}, {"text": "b"', 1, "is not JSON ("),
        ('[{"text": "a"}, {"text": b}]', 1, "is not JSON (Expecting value"),
        ('[{"text": "a"}', 1, "is not JSON (the array has no end)"),
        ('[{"text": "a"}] x', 1, "is not JSON (there is text after the array)"),
        ('["a"]', 0, "is a string, not an object"),
    ],
)
def test_damaged_json_arrays_yield_the_documents_before(
    tmp_path: Path, content: str, num_read: int, reason: str
) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    *documents, damage = _read(path)
    assert documents == [b"a"] * num_read
    assert isinstance(damage, DamagedDocument)
    assert damage.reason.startswith(reason)


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2", ".xz"])
def test_all_documents_of_a_file_without_its_last_bytes_are_read(
    tmp_path: Path, suffix: str
) -> None:
    documents = [f"doc {i}" for i in range(5000)]
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](_lines(documents))[:-4])
    *read, damage = _read(path)
    assert isinstance(damage, DamagedDocument)
    if suffix != ".zst":  # whose last bytes are of the last block
        assert len(read) == 5000
        assert damage.location == "after line 5000"
    assert read == [text.encode() for text in documents[: len(read)]]
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(COMPRESS[suffix]("é".encode() * 300_000)[:-4])
    *texts, damage = _read(path)
    assert isinstance(damage, DamagedDocument)
    assert all(set(text.decode()) <= {"é"} for text in texts if isinstance(text, bytes))


def test_damaged_row_groups_are_counted_with_their_rows(tmp_path: Path) -> None:
    path, rng = tmp_path / "a.parquet", random.Random(0)
    texts = [f"{i} {rng.randbytes(100).hex()}" for i in range(2000)]
    table, options = pa.table({"text": texts}), {"use_dictionary": False}
    pq.write_table(table, path, row_group_size=100, write_page_checksum=True, **options)
    content, metadata = bytearray(path.read_bytes()), pq.ParquetFile(path).metadata
    for group in (3, 7):
        start = metadata.row_group(group).column(0).data_page_offset
        content[start + 2000 : start + 2005] = b"\xff" * 5
    path.write_bytes(content)
    read = _read(path)
    damages = [one for one in read if isinstance(one, DamagedDocument)]
    assert [one.num_documents for one in damages] == [100, 100]
    assert [one.location for one in damages] == ["after 300 rows", "after 700 rows"]
    sizes = [len("".join(texts[start : start + 100])) for start in (300, 700)]
    assert [one.num_bytes for one in damages] == pytest.approx(sizes, rel=0.05)
    kept = [text.encode() for i, text in enumerate(texts) if i // 100 not in (3, 7)]
    assert [one for one in read if isinstance(one, bytes)] == kept


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_columns_within_structs_and_lists(tmp_path: Path, name: str) -> None:
    table = pa.table(
        {
            "meta": pa.array([{"body": "x", "n": 1}, None, {"body": "z", "n": 2}]),
            "lines": pa.array([["a", "", "b"], None, ["c", None]]),
        }
    )
    path = tmp_path / name
    if name == "a.parquet":
        pq.write_table(table, path)
    else:
        with path.open("wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    assert _read(path, "meta.body") == [b"x", b"", b"z"]
    assert _read(path, "lines") == [b"a\n\nb", b"", b"c"]
    with pytest.raises(ConfigError, match=r"one of: meta\.body, lines"):
        _read(path, "meta")
    dataset = ArrowDataset([path], "meta.body")
    assert [dataset.read_text(row) for row in range(3)] == ["x", "", "z"]
