"""What a corpus holds, before a run or a preparation reads it: counts, sizes, tokens, samples.

Whoever mixes sources needs to know how large each is in tokens, and whoever got a file needs to see
what is in it. Rows are counted where that is cheap and estimated where it is not; tokens are always
estimated, from the bytes per token of a sample, and every number says which it is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hlat.config.errors import ConfigError
from hlat.data.corpus import Corpus
from hlat.data.preparation import documents, inputs, prepared, shards
from hlat.data.preparation.documents import Damage
from hlat.data.preparation.inputs import Input, OpenInput
from hlat.data.preparation.prepared import Manifest
from hlat.data.preparation.progress import format_bytes
from hlat.data.tokenizer import EMBEDDED_FILE, parse

SAMPLE_DOCUMENTS = 256
"""Documents of a source at most whose tokens are counted."""
SAMPLE_FILES = 8
"""Files at most, spread over a source, whose beginnings are read."""
SAMPLE_BYTES = 2 << 20
"""Bytes of text after which no more of a file is read."""
SHOWN = 3
SHOWN_CHARACTERS = 200

_FILE_MAGIC = b"ARROW1"


@dataclass(frozen=True)
class Count:
    """A number and how well it is known."""

    value: float
    mark: str = ""
    """Empty: exact; `~`: estimated; `>=`: the most that was seen."""


@dataclass(frozen=True)
class Contents:
    """What a source holds."""

    name: str
    documents: Count
    text_bytes: Count
    longest_bytes: Count
    empty: Count | None
    damaged: Count | None
    sample: tuple[str, ...]
    """Documents spread over it."""


def inspect(path: str, column: str) -> list[Contents]:
    """Look into whatever a run or a preparation reads.

    Args:
        path: A prepared folder, a folder of such, or inputs as `hlat.prepare` takes them.
        column: Column of the text in inputs.

    Raises:
        ConfigError: If there is nothing of the kind, or it cannot be read.
    """
    complete = prepared.find_complete(Path(path))
    if complete:
        return [_of_prepared(folder, manifest) for folder, manifest in complete.items()]
    return [_of_inputs(path, inputs.find([path]), column)]


def _of_prepared(folder: Path, manifest: Manifest) -> Contents:
    corpus = Corpus([folder / part.name for part in manifest.files], shards.COLUMN)
    return Contents(
        manifest.source,
        Count(manifest.documents),
        Count(manifest.text_bytes),
        Count(max(part.longest_bytes for part in manifest.files)),
        Count(manifest.empty),
        Count(manifest.damaged),
        tuple(_spread_texts(corpus)),
    )


def _spread_texts(corpus: Corpus) -> Iterator[str]:
    yield from (corpus.text(row) for row in _spread(len(corpus)))


def _of_inputs(name: str, files: Sequence[Input], column: str) -> Contents:
    if all(_can_be_mapped(one) for one in files):
        return _of_mapped(name, Corpus([Path(one.path) for one in files], column))
    return _of_sample(name, files, column)


def _can_be_mapped(one: Input) -> bool:
    """Whether a file's texts lie in it as plain bytes, so that looking at them costs nothing."""
    if "://" in one.path or inputs.kind(one.path) != ("arrow", None):
        return False
    try:
        mapped = pa.memory_map(one.path).read_buffer()
        is_file = mapped[: len(_FILE_MAGIC)].to_pybytes() == _FILE_MAGIC
        reader = pa.ipc.open_file(mapped) if is_file else pa.ipc.open_stream(mapped)
        batch = reader.get_batch(0) if is_file else reader.read_next_batch()
    except (pa.ArrowException, OSError, ValueError, StopIteration):
        return False
    buffers = [buffer for array in batch.columns for buffer in array.buffers() if buffer]
    end = mapped.address + mapped.size
    return all(mapped.address <= buffer.address <= end for buffer in buffers)


def _of_mapped(name: str, corpus: Corpus) -> Contents:
    texts = tuple(_spread_texts(corpus))
    longest = max((len(text.encode()) for text in texts), default=0)
    every = len(texts) == len(corpus)
    return Contents(
        name,
        Count(len(corpus)),
        Count(corpus.num_bytes),
        Count(longest, "" if every else ">="),
        Count(texts.count("")) if every else None,
        None,
        texts,
    )


def _of_sample(name: str, files: Sequence[Input], column: str) -> Contents:
    samples = [_Sample(files[i], column) for i in _spread(len(files), SAMPLE_FILES)]
    texts = [text for sample in samples for text in sample.texts]
    whole = len(samples) == len(files) and all(sample.whole for sample in samples)
    rows = _extrapolate(files, samples, [float(sample.num_rows) for sample in samples])
    size = _extrapolate(files, samples, [sum(map(len, sample.texts)) for sample in samples])
    exact_rows = rows if whole else _count_parquet_rows(files)
    empty, damaged = (
        Count(count, "" if whole else ">=") if whole or count else None
        for count in (sum(one.empty for one in samples), sum(one.damaged for one in samples))
    )
    return Contents(
        name,
        Count(rows, "~") if exact_rows is None else Count(exact_rows),
        Count(size * (exact_rows or rows) / max(1, rows), "" if whole else "~"),
        Count(max(map(len, texts), default=0), "" if whole else ">="),
        empty,
        damaged,
        tuple(str(texts[i], "utf-8") for i in _spread(len(texts))),
    )


def _extrapolate(
    files: Sequence[Input], samples: Sequence["_Sample"], amounts: Sequence[float]
) -> float:
    """What all files have of something, by what samples of files of the same kind have a byte."""
    found: dict[str, list[float]] = {}
    for sample, amount in zip(samples, amounts, strict=True):
        for key in (sample.kind, "any"):
            sums = found.setdefault(key, [0.0, 0.0])
            sums[0] += amount
            sums[1] += sample.num_read
    density = {key: amount / max(1.0, read) for key, (amount, read) in found.items()}
    return sum(one.bytes * density.get(_kind(one), density["any"]) for one in files)


def _kind(one: Input) -> str:
    return str(inputs.kind(one.path))


def _spread(count: int, most: int = SAMPLE_DOCUMENTS) -> list[int]:
    """At most so many numbers below `count`, as far apart as they can be."""
    return [int(i) for i in np.linspace(0, count - 1, min(most, count))]


class _Sample:
    """The beginning of a file."""

    def __init__(self, one: Input, column: str) -> None:
        self.texts: list[bytes] = []
        self.empty = self.damaged = 0
        self.kind = _kind(one)
        size = 0
        with OpenInput(one.path) as file:
            for document in documents.read_open(file, one.path, column):
                if isinstance(document, Damage):
                    self.damaged += 1
                elif not document:
                    self.empty += 1
                else:
                    self.texts.append(document)
                    size += len(document)
                if size >= SAMPLE_BYTES:
                    break
            self.whole = size < SAMPLE_BYTES
            self.num_read = one.bytes if self.whole else min(file.num_read, one.bytes)

    @property
    def num_rows(self) -> int:
        return len(self.texts) + self.empty + self.damaged


def _count_parquet_rows(files: Sequence[Input]) -> int | None:
    """Rows by the footers of Parquet files; None where there are other files."""
    if any(inputs.kind(one.path) != ("parquet", None) for one in files):
        return None
    try:
        return sum(_parquet_rows(one.path) for one in files)
    except (pa.ArrowException, OSError):
        return None


def _parquet_rows(path: str) -> int:
    with OpenInput(path) as file:
        return int(pq.ParquetFile(file).metadata.num_rows)


def count_tokens(texts: Sequence[str], tokenizer: Path | None) -> int:
    """Tokens of documents, with one more for the end of each.

    Args:
        texts: Documents.
        tokenizer: A tokenizer.json; None: the embedded one.

    Raises:
        ConfigError: If it is not one.
    """
    path = tokenizer or EMBEDDED_FILE
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--tokenizer {path}: cannot be read ({error.strerror})") from error
    rust = parse(f"--tokenizer {path}:", content)
    encodings = rust.encode_batch_fast(list(texts), add_special_tokens=False)
    return sum(len(encoding.ids) + 1 for encoding in encodings)


def report(sources: Sequence[Contents], tokenizer: Path | None) -> Iterator[str]:
    """A table of sources, how its numbers came about, and samples, line by line.

    Raises:
        ConfigError: If the tokenizer is not one.
    """
    rows: list[tuple[str, ...]] = [
        ("source", "documents", "text", "mean", "longest", "tokens", "empty", "damaged")
    ]
    counted = 0
    for source in sources:
        texts = [text for text in source.sample if text]
        tokens = count_tokens(texts, tokenizer)
        counted += len(texts)
        num_bytes = max(1, sum(len(text.encode()) for text in texts))
        rows.append(_row(source, tokens / num_bytes))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        yield f"{name.ljust(widths[0])}  {'  '.join(numbers)}".rstrip()
    yield (
        f"Tokens are estimated from the bytes per token of {counted:,} documents with "
        f"{tokenizer or 'the embedded tokenizer'}; ~ is estimated, >= is the most seen in a sample."
    )
    for source in sources:
        yield from _samples(source)


def _row(source: Contents, tokens_per_byte: float) -> tuple[str, ...]:
    size, number = source.text_bytes, source.documents
    mean = Count(size.value / max(1, number.value), size.mark or number.mark)
    return (
        source.name,
        _plain(number),
        _size(size),
        _size(mean),
        _size(source.longest_bytes),
        f"~{prefixed(size.value * tokens_per_byte)}",
        _plain(source.empty),
        _plain(source.damaged),
    )


def prefixed(count: float) -> str:
    """A count as people say it: 31.2B tokens are 31,200,000,000."""
    for factor, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= factor:
            return f"{count / factor:.3g}{letter}"
    return f"{count:.0f}"


def _plain(count: Count | None) -> str:
    return "-" if count is None else f"{count.mark}{count.value:,.0f}"


def _size(count: Count) -> str:
    return f"{count.mark}{format_bytes(count.value)}"


def _samples(source: Contents) -> Iterator[str]:
    texts = [text for text in source.sample if text]
    for number in range(min(SHOWN, len(texts))):
        text = texts[number * len(texts) // SHOWN]
        more = "..." if len(text) > SHOWN_CHARACTERS else ""
        yield ""
        yield f"{source.name}: {_escaped(text[:SHOWN_CHARACTERS])}{more}"


def _escaped(text: str) -> str:
    """Text on one line, without what would steer a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
