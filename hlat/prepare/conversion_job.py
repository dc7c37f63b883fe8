"""Conversion of some input files to the shards of one directory, atomically.

The shards of a job are published by one rename to a directory named after a hash of all its
inputs and settings. The work of an interrupted job is discarded, a finished job is not repeated,
and a changed input makes it a different job.
"""

import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from hlat.config.config_errors import ConfigError
from hlat.data import row_index
from hlat.prepare import arrow_shards, document_reader
from hlat.prepare.arrow_shards import ArrowShardWriter, ShardRecord
from hlat.prepare.corpus_manifest import (
    IndexRecord,
    InputRecord,
    load_work_file,
    parse_counts,
    parse_records,
    write_json,
)
from hlat.prepare.document_filters import DocumentFilter
from hlat.prepare.document_reader import DamagedDocument
from hlat.prepare.document_settings import DocumentSettings
from hlat.prepare.document_signatures import SignatureWriter
from hlat.prepare.file_formats import parse_name
from hlat.prepare.input_files import InputReader
from hlat.prepare.text_losses import FileLosses, TextLoss
from hlat.storage import durable_files
from hlat.storage.data_file import DataFile

FORMAT_VERSION = 2
"""Part of the hash that names a job; increased when the same inputs result in other shards."""
TARGET_JOB_BYTES = 256 << 20
"""Estimated bytes of text that complete a job: many small files share shards, and are still
divided among the workers."""
COMPRESSION_RATIO = 4
"""Approximate bytes of text per byte of a compressed file."""
TEMPORARY_PREFIX = "unfinished-"
RECEIPT_FILE = "receipt.json"
SIGNATURE_FILE = "signatures"


@dataclass(frozen=True)
class ConversionJob:
    """Input files that are converted together."""

    work_dir: Path
    """Parent of the job's directory."""
    inputs: tuple[DataFile, ...]
    column: str
    skip_damaged: bool
    settings: DocumentSettings = field(default_factory=DocumentSettings)

    @property
    def output_dir(self) -> Path:
        """Directory of the shards of a finished job."""
        inputs = [
            {"path": file.location, "bytes": file.num_bytes, "version": file.version}
            for file in self.inputs
        ]
        key: list[Any] = [FORMAT_VERSION, self.column, inputs]
        if settings := self.settings.to_json():
            key.append(settings)
        return self.work_dir / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]

    @property
    def num_bytes(self) -> int:
        """Size of the input files."""
        return sum(file.num_bytes for file in self.inputs)


@dataclass(frozen=True)
class JobReceipt:
    """Result of a finished job; `indices` are the row indices of `parts`, its shards."""

    inputs: tuple[InputRecord, ...]
    parts: tuple[ShardRecord, ...]
    indices: tuple[IndexRecord, ...]
    removed: dict[str, int] = field(default_factory=dict)
    """Number of removed documents by filter."""
    removed_samples: dict[str, list[str]] = field(default_factory=dict)
    """Beginnings of some of them."""
    lost: tuple[TextLoss, ...] = ()
    encodings: dict[str, int] = field(default_factory=dict)
    """Number of documents converted from other encodings than UTF-8."""
    num_bytes_read: int = 0
    """Bytes of text before filters."""


def split_into_jobs(
    work_dir: Path,
    inputs: Iterable[DataFile],
    column: str,
    skip_damaged: bool,
    settings: DocumentSettings,
) -> Iterator[ConversionJob]:
    """Divide input files into jobs by their sizes, which every attempt repeats exactly."""
    batch: list[DataFile] = []
    size = 0
    for file in inputs:
        batch.append(file)
        size += estimate_text_bytes(file)
        if size >= TARGET_JOB_BYTES:
            yield ConversionJob(work_dir, tuple(batch), column, skip_damaged, settings)
            batch, size = [], 0
    if batch:
        yield ConversionJob(work_dir, tuple(batch), column, skip_damaged, settings)


def estimate_text_bytes(file: DataFile) -> int:
    """Return the approximate bytes of text in a file."""
    name, codec = parse_name(file.location)
    is_compressed = codec or name in ("parquet", "arrow")
    return file.num_bytes * (COMPRESSION_RATIO if is_compressed else 1)


def load_receipt(output_dir: Path) -> JobReceipt | None:
    """Return the receipt in the directory of a job; None if the job is not finished.

    Raises:
        ConfigError: If the receipt was not written by hlat prepare.
    """
    path = output_dir / RECEIPT_FILE
    try:
        content = load_work_file(path)
    except FileNotFoundError:
        return None
    try:
        return JobReceipt(
            parse_records(InputRecord, content["inputs"]),
            parse_records(ShardRecord, content["parts"]),
            parse_records(IndexRecord, content["indices"]),
            parse_counts(content.get("removed", {})),
            dict(content.get("removed_samples", {})),
            parse_records(TextLoss, content["lost"]),
            parse_counts(content["encodings"]),
            int(content["num_bytes_read"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: is not a receipt of hlat prepare ({error!r})") from error


def run_conversion_job(job: ConversionJob, on_progress: Callable[[int], None]) -> None:
    """Convert the input files of an unfinished job.

    `on_progress` is called with the number of bytes of each read; its exceptions stop the job.

    Raises:
        ConfigError: If an input file cannot be read, or is damaged and `skip_damaged` is False.
        OSError: If writing fails.
    """

    def write(directory: Path, writer: ArrowShardWriter) -> JobReceipt:
        with ExitStack() as stack:
            add = writer.add
            if job.settings.needs_signatures:
                path, has_minhash = directory / SIGNATURE_FILE, job.settings.needs_minhash
                signatures = stack.enter_context(SignatureWriter(path, has_minhash))
                add = partial(_add_signed, writer, signatures)
            return _InputConverter(job, add, on_progress).convert()

    write_job_shards(job.output_dir, write)


def write_job_shards(
    output_dir: Path, write: Callable[[Path, ArrowShardWriter], JobReceipt]
) -> None:
    """Create the directory of a finished job atomically.

    `write` gets the directory and its writer, and returns the receipt without shards.

    Raises:
        OSError: If writing fails.
    """
    parent = output_dir.parent
    with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=parent) as temporary:
        directory = Path(temporary) / output_dir.name
        directory.mkdir()
        writer = ArrowShardWriter(directory)
        try:
            receipt = write(directory, writer)
            shards = writer.finish()
        finally:
            writer.close_unfinished()
        indices = tuple(_write_row_indices(directory, shards))
        receipt = replace(receipt, parts=tuple(shards), indices=indices)
        write_json(directory / RECEIPT_FILE, asdict(receipt))
        durable_files.rename_durably(directory, output_dir)


def _add_signed(writer: ArrowShardWriter, signatures: SignatureWriter, document: bytes) -> None:
    writer.add(document)
    signatures.add(document)


class _InputConverter:
    """Conversion of the documents of all input files of a job."""

    def __init__(
        self,
        job: ConversionJob,
        add: Callable[[bytes], None],
        on_progress: Callable[[int], None],
    ) -> None:
        self._job, self._add, self._on_progress = job, add, on_progress
        self._filters = DocumentFilter(job.settings.filters)
        self._encodings: Counter[str] = Counter()
        self._lost: list[TextLoss] = []
        self._num_bytes_read = 0

    def convert(self) -> JobReceipt:
        """Return the receipt without shards."""
        records = tuple(map(self._convert_file, self._job.inputs))
        return JobReceipt(
            records,
            (),
            (),
            dict(self._filters.removed),
            self._filters.samples,
            tuple(self._lost),
            dict(self._encodings),
            self._num_bytes_read,
        )

    def _convert_file(self, input_file: DataFile) -> InputRecord:
        counts = {"documents": 0, "text_bytes": 0, "empty": 0, "damaged": 0}
        path, settings = input_file.location, self._job.settings
        losses, num_read = FileLosses(path), 0
        with InputReader(path, self._on_progress) as reader:
            for document in document_reader.parse_documents(
                reader,
                path,
                self._job.column,
                settings.separator,
                settings.encoding,
                self._encodings,
            ):
                if isinstance(document, DamagedDocument):
                    self._validate_skipped(path, document)
                    losses.add(document)
                    counts["damaged"] += document.num_documents
                    continue
                num_read += bool(document)
                self._num_bytes_read += len(document)
                kept = self._filters.apply(document, path) if document else document
                if kept:
                    self._add(kept)
                    counts["documents"] += 1
                    counts["text_bytes"] += len(kept)
                elif kept is not None:
                    counts["empty"] += 1
            self._on_progress(input_file.num_bytes - reader.num_bytes_read)
        self._lost += losses.finish(num_read)
        return InputRecord(path, input_file.num_bytes, input_file.version, **counts)

    def _validate_skipped(self, path: str, document: DamagedDocument) -> None:
        """Raise ConfigError for a damaged document unless skip_damaged=true."""
        if not self._job.skip_damaged:
            raise ConfigError(
                f"{path}, {document.location}: {document.reason}; repair the file and run the same "
                "command again, or skip and count such documents with skip_damaged=true"
            )


def _write_row_indices(directory: Path, shards: Iterable[ShardRecord]) -> Iterator[IndexRecord]:
    """Write the row index of each shard and flush it to disk."""
    for shard in shards:
        file, column = directory / shard.name, arrow_shards.TEXT_COLUMN
        row_index.save_row_index(row_index.build_row_index(file, column), file, column)
        path = row_index.get_sidecar_path(file)
        with path.open("rb") as index:
            os.fsync(index.fileno())
        record = durable_files.hash_file(path)
        yield IndexRecord(path.name, record.size, record.sha256)
