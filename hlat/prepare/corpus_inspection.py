"""Statistics of a corpus before a run or a preparation reads it: documents, bytes, tokens, samples.

Rows are counted where this is cheap and estimated elsewhere. Tokens are estimated from the bytes
per token of a sample. Every number is marked as exact, estimated or a lower bound.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hlat.config.config_errors import ConfigError
from hlat.data import row_index
from hlat.data.arrow_dataset import ArrowDataset
from hlat.data.token_encoders import ReferenceEncoder
from hlat.data.tokenizer import EMBEDDED_FILE, parse_tokenizer
from hlat.data.tokenizer_probe import MAX_TOKENIZER_BYTES
from hlat.prepare import arrow_shards, corpus_manifest, document_reader, file_formats, input_files
from hlat.prepare.corpus_manifest import CorpusManifest
from hlat.prepare.document_reader import DamagedDocument
from hlat.prepare.input_files import InputReader
from hlat.storage.bounded_files import read_bounded
from hlat.storage.data_file import DataFile
from hlat.storage.progress_bar import format_bytes

MAX_SAMPLE_DOCUMENTS = 256
"""Maximum number of documents of a source whose tokens are counted."""
MAX_SAMPLE_FILES = 8
"""Maximum number of files of a source, evenly spaced, whose beginnings are read."""
MAX_SAMPLE_BYTES = 2 << 20
"""Bytes of text after which the reading of a file stops."""
NUM_SHOWN_SAMPLES = 3
MAX_SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class Estimate:
    """Number and its precision: exact (``), estimated (`~`) or a lower bound (`>=`)."""

    value: float
    qualifier: str = ""


@dataclass(frozen=True)
class CorpusStatistics:
    """Statistics of a source."""

    name: str
    num_documents: Estimate
    num_text_bytes: Estimate
    max_document_bytes: Estimate
    num_empty: Estimate | None
    num_damaged: Estimate | None
    sample_documents: tuple[str, ...]
    """Evenly spaced documents."""


def inspect_corpus(path: str, column: str) -> list[CorpusStatistics]:
    """Return the statistics of a prepared directory, its children, or inputs of `hlat prepare`.

    Raises:
        ConfigError: If no supported file exists, or a file cannot be read.
    """
    manifests = corpus_manifest.load_complete_manifests(Path(path))
    if manifests:
        return [_inspect_prepared(directory, one) for directory, one in manifests.items()]
    files = input_files.find_input_files([path])
    if all(_is_mappable(file, column) for file in files):
        return [_inspect_mapped(path, ArrowDataset(files, column))]
    return [_inspect_sample(path, files, column)]


def _inspect_prepared(directory: Path, manifest: CorpusManifest) -> CorpusStatistics:
    corpus = ArrowDataset(
        [directory / shard.name for shard in manifest.files], arrow_shards.TEXT_COLUMN
    )
    totals = {name: Estimate(total) for name, total in manifest.totals.items()}
    return CorpusStatistics(
        manifest.source,
        totals["documents"],
        totals["text_bytes"],
        Estimate(max(shard.longest_bytes for shard in manifest.files)),
        totals["empty"],
        totals["damaged"],
        _sample_documents(corpus),
    )


def _sample_documents(corpus: ArrowDataset) -> tuple[str, ...]:
    return tuple(corpus.read_text(row) for row in _compute_spaced_indices(len(corpus)))


def _is_mappable(file: DataFile, column: str) -> bool:
    """Return True if the file contains uncompressed Arrow buffers, which need not be read."""
    if file.is_remote or file_formats.parse_name(file.location) != ("arrow", None):
        return False
    try:
        if row_index.find_row_index(file, column) is None:
            index = row_index.build_row_index(Path(file.location), column)
            row_index.cache_row_index(index, file, column)
    except ConfigError:
        return False
    return True


def _inspect_mapped(name: str, corpus: ArrowDataset) -> CorpusStatistics:
    documents = _sample_documents(corpus)
    max_bytes = max((len(document.encode()) for document in documents), default=0)
    is_complete = len(documents) == len(corpus)
    return CorpusStatistics(
        name,
        Estimate(len(corpus)),
        Estimate(corpus.num_bytes),
        Estimate(max_bytes, "" if is_complete else ">="),
        Estimate(documents.count("")) if is_complete else None,
        None,
        documents,
    )


def _inspect_sample(name: str, files: Sequence[DataFile], column: str) -> CorpusStatistics:
    indices = _compute_spaced_indices(len(files), MAX_SAMPLE_FILES)
    samples = [_FileSample(files[i], column) for i in indices]
    documents = [document for sample in samples for document in sample.documents]
    is_complete = len(samples) == len(files) and all(sample.is_complete for sample in samples)
    num_rows = _extrapolate(files, samples, [float(sample.num_rows) for sample in samples])
    num_bytes = _extrapolate(files, samples, [sum(map(len, one.documents)) for one in samples])
    exact_rows = num_rows if is_complete else _count_parquet_rows(files)
    bound, estimated = ("", "") if is_complete else (">=", "~")
    num_empty = sum(one.num_empty for one in samples)
    num_damaged = sum(one.num_damaged for one in samples)
    return CorpusStatistics(
        name,
        Estimate(num_rows, "~") if exact_rows is None else Estimate(exact_rows),
        Estimate(num_bytes * (exact_rows or num_rows) / max(1, num_rows), estimated),
        Estimate(max(map(len, documents), default=0), bound),
        Estimate(num_empty, bound) if is_complete or num_empty else None,
        Estimate(num_damaged, bound) if is_complete or num_damaged else None,
        tuple(str(documents[i], "utf-8") for i in _compute_spaced_indices(len(documents))),
    )


def _extrapolate(
    files: Sequence[DataFile], samples: Sequence["_FileSample"], amounts: Sequence[float]
) -> float:
    """Estimate the total of `amounts` over all files from the amount per byte by file format."""
    totals: dict[str, list[float]] = {}
    for sample, amount in zip(samples, amounts, strict=True):
        for key in (sample.format, "any"):
            sums = totals.setdefault(key, [0.0, 0.0])
            sums[0] += amount
            sums[1] += sample.num_bytes_read
    density = {key: amount / max(1.0, num_bytes) for key, (amount, num_bytes) in totals.items()}
    return sum(file.num_bytes * density.get(_get_format(file), density["any"]) for file in files)


def _get_format(input_file: DataFile) -> str:
    return str(file_formats.parse_name(input_file.location))


def _compute_spaced_indices(count: int, max_count: int = MAX_SAMPLE_DOCUMENTS) -> list[int]:
    """Return at most `max_count` evenly spaced indices below `count`."""
    return [int(i) for i in np.linspace(0, count - 1, min(max_count, count))]


class _FileSample:
    """Documents at the beginning of a file."""

    def __init__(self, input_file: DataFile, column: str) -> None:
        self.documents: list[bytes] = []
        self.num_empty = self.num_damaged = 0
        self.format = _get_format(input_file)
        size = 0
        with InputReader(input_file.location) as reader:
            for document in document_reader.parse_documents(reader, input_file.location, column):
                if isinstance(document, DamagedDocument):
                    self.num_damaged += 1
                elif not document:
                    self.num_empty += 1
                else:
                    self.documents.append(document)
                    size += len(document)
                if size >= MAX_SAMPLE_BYTES:
                    break
            self.is_complete = size < MAX_SAMPLE_BYTES
            num_read = input_file.num_bytes if self.is_complete else reader.num_bytes_read
            self.num_bytes_read = min(num_read, input_file.num_bytes)
        self.num_rows = len(self.documents) + self.num_empty + self.num_damaged


def _count_parquet_rows(files: Sequence[DataFile]) -> int | None:
    """Return the number of rows in the footers of Parquet files; None for other files."""
    if any(file_formats.parse_name(file.location) != ("parquet", None) for file in files):
        return None
    num_rows = 0
    try:
        for file in files:
            with InputReader(file.location) as reader:
                num_rows += int(pq.ParquetFile(reader).metadata.num_rows)
    except (pa.ArrowException, OSError):
        return None
    return num_rows


def count_tokens(documents: Sequence[str], tokenizer: Path | None) -> int:
    """Return the number of tokens of documents, including one end-of-document token for each.

    `tokenizer` is a tokenizer.json; None selects the embedded one.

    Raises:
        ConfigError: If the file is not a tokenizer, or cannot encode a document.
    """
    path = tokenizer or EMBEDDED_FILE
    try:
        content = read_bounded(path, MAX_TOKENIZER_BYTES)
    except OSError as error:
        raise ConfigError(f"tokenizer={path}: cannot be read ({error.strerror})") from error
    parsed = parse_tokenizer(f"tokenizer={path}:", content)
    ids = ReferenceEncoder(parsed, f"tokenizer={path}:").encode(documents)
    return sum(len(one) + 1 for one in ids)


def format_report(sources: Sequence[CorpusStatistics], tokenizer: Path | None) -> Iterator[str]:
    """Yield the lines of a table of sources, a note on its estimates, and sample documents.

    Raises:
        ConfigError: If the file is not a tokenizer.
    """
    rows: list[tuple[str, ...]] = [
        ("source", "documents", "text", "mean", "longest", "tokens", "empty", "damaged")
    ]
    num_counted = 0
    for source in sources:
        documents = [document for document in source.sample_documents if document]
        num_counted += len(documents)
        num_bytes = max(1, sum(len(document.encode()) for document in documents))
        rows.append(_format_row(source, count_tokens(documents, tokenizer) / num_bytes))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        yield f"{name.ljust(widths[0])}  {'  '.join(numbers)}".rstrip()
    yield (
        f"Tokens are estimated from the bytes per token of {num_counted:,} documents with "
        f"{tokenizer or 'the embedded tokenizer'}; ~ is estimated, >= is the maximum in a sample."
    )
    for source in sources:
        yield from _format_samples(source)


def _format_row(source: CorpusStatistics, tokens_per_byte: float) -> tuple[str, ...]:
    num_bytes, num_documents = source.num_text_bytes, source.num_documents
    mean = Estimate(
        num_bytes.value / max(1, num_documents.value),
        num_bytes.qualifier or num_documents.qualifier,
    )
    return (
        source.name,
        _format_number(num_documents),
        _format_size(num_bytes),
        _format_size(mean),
        _format_size(source.max_document_bytes),
        f"~{format_count(num_bytes.value * tokens_per_byte)}",
        _format_number(source.num_empty),
        _format_number(source.num_damaged),
    )


def format_count(count: float) -> str:
    """Return a count with three digits and a suffix, such as 31.2B for 31,200,000,000."""
    for factor, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= factor:
            return f"{count / factor:.3g}{letter}"
    return f"{count:.0f}"


def _format_number(count: Estimate | None) -> str:
    return "-" if count is None else f"{count.qualifier}{count.value:,.0f}"


def _format_size(count: Estimate) -> str:
    return f"{count.qualifier}{format_bytes(count.value)}"


def _format_samples(source: CorpusStatistics) -> Iterator[str]:
    """Yield sample documents on one line each, with control characters escaped."""
    documents = [document for document in source.sample_documents if document]
    for number in range(min(NUM_SHOWN_SAMPLES, len(documents))):
        document = documents[number * len(documents) // NUM_SHOWN_SAMPLES]
        start = document[:MAX_SHOWN_CHARACTERS]
        ellipsis = "..." if len(document) > MAX_SHOWN_CHARACTERS else ""
        escaped = "".join(c if c.isprintable() else repr(c)[1:-1] for c in start)
        yield ""
        yield f"{source.name}: {escaped}{ellipsis}"
