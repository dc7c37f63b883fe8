"""Statistics of corpora are exact, or marked as estimates."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers

from hlat.config.config_errors import ConfigError
from hlat.data.tokenizer import EMBEDDED_FILE
from hlat.prepare import corpus_inspection, input_files, preparation, preparation_source
from hlat.prepare.corpus_inspection import CorpusStatistics, Estimate


@pytest.fixture
def documents(make_documents) -> list[str]:
    return make_documents("inspected", 400)


def _write_lines(path: Path, documents: list[str | None]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in documents).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def _inspect(path: Path, column: str = "text") -> CorpusStatistics:
    (contents,) = corpus_inspection.inspect_corpus(str(path), column)
    return contents


def _size(documents: list[str]) -> int:
    return sum(len(text.encode()) for text in documents)


def _longest(documents: list[str]) -> int:
    return max(len(text.encode()) for text in documents)


def test_statistics_of_a_prepared_directory_are_exact(tmp_path: Path, documents: list[str]) -> None:
    _write_lines(tmp_path / "in/github/a.jsonl", [*documents, "", None])
    _write_lines(tmp_path / "in/arxiv/b.jsonl.gz", documents[:9])
    found = input_files.find_input_files([str(tmp_path / "in")])
    sources, _ = preparation_source.plan_sources(tmp_path / "data", found, "text", "redpajama")
    preparation.prepare_sources(sources, 1, False, lambda _: None)
    arxiv, github = corpus_inspection.inspect_corpus(str(tmp_path / "data"), "text")
    assert (arxiv.name, arxiv.num_documents, arxiv.sample_documents) == (
        "arxiv",
        Estimate(9),
        tuple(documents[:9]),
    )
    assert github == CorpusStatistics(
        "github",
        Estimate(400),
        Estimate(_size(documents)),
        Estimate(_longest(documents)),
        Estimate(2),
        Estimate(0),
        github.sample_documents,
    )
    assert len(github.sample_documents) == 256
    assert set(github.sample_documents) <= set(documents)


def test_small_json_lines_files_are_read_completely(tmp_path: Path, documents: list[str]) -> None:
    path = _write_lines(tmp_path / "a.jsonl.gz", [*documents, "", None])
    path.write_bytes(path.read_bytes() + gzip.compress(b"no json\n"))
    found = _inspect(path)
    assert found.num_documents == Estimate(403)
    assert found.num_text_bytes == Estimate(_size(documents))
    assert found.max_document_bytes == Estimate(_longest(documents))
    assert (found.num_empty, found.num_damaged) == (Estimate(2), Estimate(1))


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_statistics_of_large_json_lines_files_are_estimated(
    tmp_path: Path, documents: list[str], suffix: str, monkeypatch
) -> None:
    monkeypatch.setattr(corpus_inspection, "MAX_SAMPLE_FILES", 3)
    monkeypatch.setattr(corpus_inspection, "MAX_SAMPLE_BYTES", 1_200_000)
    many = [text * 40 for text in documents]
    for number in range(5):
        _write_lines(tmp_path / f"in/{number}.{suffix}", many)
    found = _inspect(tmp_path / "in")
    assert (
        found.num_documents.qualifier,
        found.num_text_bytes.qualifier,
        found.max_document_bytes.qualifier,
    ) == (
        "~",
        "~",
        ">=",
    )
    assert (found.num_empty, found.num_damaged) == (None, None)
    if suffix == "jsonl":  # repetitions compress too well for estimates of .gz files
        assert found.num_documents.value == pytest.approx(5 * len(many), rel=0.35)
        assert found.num_text_bytes.value == pytest.approx(5 * _size(many), rel=0.35)


def test_parquet_rows_are_counted_exactly(
    tmp_path: Path, documents: list[str], monkeypatch
) -> None:
    monkeypatch.setattr(corpus_inspection, "MAX_SAMPLE_BYTES", 10_000)
    (tmp_path / "in").mkdir()
    for number in range(3):
        pq.write_table(pa.table({"body": documents}), tmp_path / f"in/{number}.parquet")
    found = _inspect(tmp_path / "in", "body")
    assert found.num_documents == Estimate(1200)
    assert found.num_text_bytes.qualifier == "~"
    assert found.num_text_bytes.value == pytest.approx(3 * _size(documents), rel=0.2)


def test_arrow_files_are_mapped_or_read(tmp_path: Path, documents: list[str], write_arrow) -> None:
    mapped = _inspect(write_arrow(tmp_path / "a.arrow", documents))
    assert (mapped.num_documents, mapped.num_text_bytes) == (
        Estimate(400),
        Estimate(_size(documents)),
    )
    assert mapped.max_document_bytes.qualifier == ">="
    streamed = _inspect(write_arrow(tmp_path / "c.arrow", documents, stream=True))
    assert (streamed.num_documents, streamed.sample_documents) == (
        Estimate(400),
        mapped.sample_documents,
    )
    compressed = _inspect(write_arrow(tmp_path / "b.arrow", documents, compression="zstd"))
    assert compressed.max_document_bytes == Estimate(_longest(documents))
    assert (compressed.num_documents, compressed.num_text_bytes) == (
        Estimate(400),
        Estimate(_size(documents)),
    )


def test_table_marks_estimates_and_their_basis(tmp_path: Path) -> None:
    documents = ["first\x1b[31m line\nsecond", "x" * 300, *["word " * 10] * 98]
    sources = corpus_inspection.inspect_corpus(
        str(_write_lines(tmp_path / "a.jsonl", documents)), "text"
    )
    lines = list(corpus_inspection.format_report(sources, None))
    rust = tokenizers.Tokenizer.from_file(str(EMBEDDED_FILE))
    tokens = sum(len(rust.encode(text).ids) + 1 for text in documents)
    header, row, note = lines[:3]
    assert " ".join(header.split()) == "source documents text mean longest tokens empty damaged"
    assert row.split()[1:] == ["100", "5.22kB", "52.2B", "300B", f"~{tokens / 1000:.3g}k", "0", "0"]
    assert "of 100 documents with the embedded tokenizer" in note
    assert lines[4].endswith(r"a.jsonl: first\x1b[31m line\nsecond")
    assert len(lines) == 9


def test_other_and_invalid_tokenizers(tmp_path: Path) -> None:
    rust = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    rust.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    rust.save(str(tmp_path / "words.json"))
    assert corpus_inspection.count_tokens(["a b a", "c"], tmp_path / "words.json") == 6
    (tmp_path / "none.json").write_text("{}")
    for name, message in (
        ("none.json", "is not a tokenizer.json that the tokenizers library"),
        ("absent.json", "cannot be read (No such file or directory)"),
    ):
        with pytest.raises(ConfigError) as error:
            corpus_inspection.count_tokens(["a"], tmp_path / name)
        assert str(error.value).startswith(f"tokenizer={tmp_path / name}: {message}")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (1234, "1.23k"), (34.6e6, "34.6M"), (1.2e12, "1.2T")],
)
def test_format_of_large_counts(count: float, text: str) -> None:
    assert corpus_inspection.format_count(count) == text
