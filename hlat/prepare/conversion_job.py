"""Conversion of some input files to the shards of one directory, atomically.

The shards of a job are published by one rename to a directory named after a hash of all its
inputs and settings. The work of an interrupted job is discarded, a finished job is not repeated,
and a changed input makes it a different job.
"""

import hashlib
import json
import os
import tempfile
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
from hlat.prepare.input_files import InputReader, detect_format
from hlat.storage import durable_files
from hlat.storage.data_file import DataFile

FORMAT_VERSION = 1
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
    is_plain = detect_format(file.location) in (("lines", None), ("text", None))
    return file.num_bytes * (1 if is_plain else COMPRESSION_RATIO)


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
        filters = DocumentFilter(job.settings.filters)
        with ExitStack() as stack:
            add = writer.add
            if job.settings.needs_signatures:
                path, has_minhash = directory / SIGNATURE_FILE, job.settings.needs_minhash
                signatures = stack.enter_context(SignatureWriter(path, has_minhash))
                add = partial(_add_signed, writer, signatures)
            records = [_convert_input(job, file, filters, add, on_progress) for file in job.inputs]
        return JobReceipt(tuple(records), (), (), dict(filters.removed), filters.samples)

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


def _convert_input(
    job: ConversionJob,
    input_file: DataFile,
    filters: DocumentFilter,
    add: Callable[[bytes], None],
    on_progress: Callable[[int], None],
) -> InputRecord:
    counts = {"documents": 0, "text_bytes": 0, "empty": 0, "damaged": 0}
    path = input_file.location
    with InputReader(path, on_progress) as reader:
        for document in document_reader.parse_documents(
            reader, path, job.column, job.settings.separator
        ):
            if isinstance(document, DamagedDocument):
                if not job.skip_damaged:
                    raise ConfigError(
                        f"{path}, {document.location}: {document.reason}; repair the file and run "
                        "the same command again, or skip and count such documents with "
                        "skip_damaged=true"
                    )
                counts["damaged"] += 1
                continue
            kept = filters.apply(document, path) if document else document
            if kept:
                add(kept)
                counts["documents"] += 1
                counts["text_bytes"] += len(kept)
            elif kept is not None:
                counts["empty"] += 1
        on_progress(input_file.num_bytes - reader.num_bytes_read)
    return InputRecord(path, input_file.num_bytes, input_file.version, **counts)


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
