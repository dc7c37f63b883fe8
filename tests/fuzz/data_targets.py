"""Readers of tokenizers and of data: Arrow, row indices, saved data sets, manifests, JSON lines."""

import gzip
import io
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from hlat.data import row_index
from hlat.data.arrow_dataset import ArrowDataset
from hlat.data.source_files import find_source_files
from hlat.data.tokenizer import Tokenizer
from hlat.prepare.__main__ import main as prepare
from hlat.prepare.corpus_manifest import verify_corpus
from hlat.prepare.document_reader import parse_documents
from hlat.prepare.input_files import InputReader, find_input_files
from tests.fuzz.fuzzer import Target
from tests.fuzz.mutations import (
    either,
    mutate_bytes,
    mutate_json,
    mutate_rows,
    mutate_with_crc32,
)

EOS = "<eos>"
TEXT = "The cat's 3 kittens sat.\n\n  def f(x): return x ** 2  # 木曜日 😀\n" * 3
TEXTS = ["first document", "", "second: é 木曜日", "x" * 300, "last\n"]
ARROW_BYTES = 1314
"""Size of the first Arrow file of `_build_arrow_files`."""
MAX_ROWS = 50
"""Rows that are read from a data set, whose size may be wrong."""


def serialize_rows(rows: list[dict[str, object]]) -> bytes:
    """Return JSON lines."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _build_tokenizers(_: Path) -> list[bytes]:
    vocab = {EOS: 0, "a": 1, "b": 2, "ab": 3, "?": 4}
    scores = [(EOS, 0.0), ("a", -1.0), ("b", -2.0), ("ab", -1.5), ("?", -3.0)]
    contents = []
    for model in (
        models.BPE(vocab, [("a", "b")], unk_token="?"),
        models.WordLevel(vocab, unk_token="?"),
        models.WordPiece(vocab, unk_token="?"),
        models.Unigram(scores, unk_id=4),
    ):
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.NFC(), normalizers.Replace(" ", "a")]
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"\p{L}+|\s+"), "isolated")
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([EOS])
        contents.append(tokenizer.to_str().encode())
    return contents


def _read_tokenizer(directory: Path, content: bytes) -> object:
    (directory / "tokenizer.json").write_bytes(content)
    tokenizer = Tokenizer("tokenizer.json", str(directory), EOS, max_lost_text=1.0)
    return [tokenizer.decode(ids.tolist()) for ids in tokenizer.encode([TEXT, "", "a b ab"])]


def _build_arrow_files(directory: Path) -> list[bytes]:
    os.environ["HLAT_CACHE"] = str(directory / "cache")
    table = pa.table({"text": [*TEXTS, None], "id": [*range(len(TEXTS) + 1)]})
    large = table.set_column(0, "text", table["text"].cast(pa.large_string()))
    compressed = pa.ipc.IpcWriteOptions(compression="zstd")
    contents = []
    for rows, open_writer, options in (
        (table, pa.ipc.new_file, None),
        (large, pa.ipc.new_stream, None),
        (table, pa.ipc.new_file, compressed),
    ):
        sink = io.BytesIO()
        with open_writer(sink, rows.schema, options=options) as writer:
            writer.write_table(rows, max_chunksize=4)
        contents.append(sink.getvalue())
    sink = io.BytesIO()
    pa.parquet.write_table(table, sink, row_group_size=4)
    return [*contents, sink.getvalue()]


def _read_arrow(directory: Path, content: bytes) -> object:
    (directory / "data.arrow").write_bytes(content)
    return _read_documents(directory)


def _read_documents(directory: Path) -> list[str]:
    dataset = ArrowDataset([directory / "data.arrow"], "text")
    dataset.compute_fingerprint()
    return [dataset.read_text(row) for row in range(min(len(dataset), MAX_ROWS))]


def _build_row_index(directory: Path) -> list[bytes]:
    path = directory / "data.arrow"
    path.write_bytes(_build_arrow_files(directory)[0])
    row_index.save_row_index(row_index.build_row_index(path, "text"), path, "text")
    return [row_index.get_sidecar_path(path).read_bytes()]


def _read_row_index(directory: Path, content: bytes) -> object:
    row_index.get_sidecar_path(directory / "data.arrow").write_bytes(content)
    return _read_documents(directory)


def _build_directory_target(name: str, *documents: object) -> Target:
    """Return the target of a JSON file that describes the files of a data directory."""

    def set_up(directory: Path) -> list[bytes]:
        content = _build_arrow_files(directory)[0]
        assert len(content) == ARROW_BYTES
        (directory / "data.arrow").write_bytes(content)
        (directory / "dataset_info.json").write_text("{}")
        return [json.dumps(document).encode() for document in documents]

    def read(directory: Path, content: bytes) -> object:
        (directory / f"{name}.json").write_bytes(content)
        if name != "dataset_dict":  # training rejects even valid ones, and names their splits
            find_source_files("data.sources.x.paths", str(directory), ["."])
        return find_input_files([str(directory)])

    return Target(f"data_{name}", set_up, read, either(mutate_json, mutate_bytes), "inputs")


def _build_corpus(directory: Path) -> list[bytes]:
    (directory / "in.jsonl").write_bytes(serialize_rows([{"text": text} for text in TEXTS]))
    code = prepare([str(directory / "in.jsonl"), f"output={directory / 'out'}", "workers=1"])
    assert code == 0
    return [(directory / "out/manifest.json").read_bytes()]


def _read_corpus(directory: Path, content: bytes) -> object:
    (directory / "out/manifest.json").write_bytes(content)
    find_source_files("data.sources.x.paths", str(directory), ["out"])
    return verify_corpus(directory / "out")


def _read_documents_of(name: str, separator: str | None = None) -> Callable[[Path, bytes], object]:
    def read(directory: Path, content: bytes) -> object:
        path = str(directory / name)
        Path(path).write_bytes(content)
        return [*parse_documents(InputReader(path), path, "text", separator)]

    return read


def _build_lines(_: Path) -> list[bytes]:
    return [serialize_rows([{"text": text, "id": 1} for text in TEXTS])]


TARGETS = [
    Target(
        "tokenizer",
        _build_tokenizers,
        _read_tokenizer,
        either(mutate_json, mutate_json, mutate_bytes),
        "tokenizer.json",
    ),
    Target("arrow", _build_arrow_files, _read_arrow, mutate_bytes, "data.arrow"),
    Target(
        "row_index",
        _build_row_index,
        _read_row_index,
        either(mutate_with_crc32, mutate_bytes),
        "data.arrow",
    ),
    _build_directory_target(
        "state",
        {"_data_files": [{"filename": "data.arrow"}], "_fingerprint": "x", "_split": "train"},
    ),
    _build_directory_target("dataset_dict", {"splits": ["train"]}),
    _build_directory_target(
        "manifest", {"format": 1, "files": [{"name": "data.arrow", "bytes": ARROW_BYTES}]}
    ),
    Target(
        "corpus_manifest",
        _build_corpus,
        _read_corpus,
        either(mutate_json, mutate_bytes),
        "out",
    ),
    Target(
        "documents",
        _build_lines,
        _read_documents_of("in.jsonl"),
        either(mutate_rows, mutate_bytes),
        "in.jsonl",
    ),
    Target(
        "documents_text_xz",
        lambda _: [lzma.compress("<|end|>".join(TEXTS).encode())],
        _read_documents_of("in.txt.xz", "<|end|>"),
        mutate_bytes,
        "in.txt.xz",
    ),
    Target(
        "documents_gzip",
        lambda directory: [gzip.compress(content) for content in _build_lines(directory)],
        _read_documents_of("in.jsonl.gz"),
        mutate_bytes,
        "in.jsonl.gz",
    ),
    Target(
        "documents_parquet",
        lambda directory: _build_arrow_files(directory)[-1:],
        _read_documents_of("in.parquet"),
        mutate_bytes,
        "in.parquet",
    ),
    Target(
        "documents_arrow",
        lambda directory: _build_arrow_files(directory)[:1],
        _read_documents_of("in.arrow"),
        mutate_bytes,
        "in.arrow",
    ),
    Target(
        "documents_json",
        lambda _: [json.dumps([{"text": text} for text in TEXTS], indent=1).encode("utf-16-le")],
        _read_documents_of("in.json"),
        mutate_bytes,
        "in.json",
    ),
]
