"""Selection among converted documents: without duplicates, divided into training and held-out.

Of equal documents, and of documents with an estimated similarity of `MIN_SIMILARITY` or more, the
first is kept. A document is held out if a hash of its text and the seed is small enough, so that
the choice does not depend on the other documents, and equal documents are on the same side.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hlat.prepare import arrow_shards, conversion_job, document_signatures
from hlat.prepare.arrow_shards import ArrowShardWriter
from hlat.prepare.conversion_job import JobReceipt
from hlat.prepare.corpus_manifest import load_work_file, write_json
from hlat.prepare.document_filters import MAX_SAMPLE_CHARACTERS
from hlat.prepare.document_settings import HELDOUT, TRAIN, DocumentSettings
from hlat.prepare.document_signatures import SignatureFiles
from hlat.storage import durable_files

MIN_SIMILARITY = 0.75
"""Similarity of near duplicates, estimated from the MinHash values."""
CODES = {TRAIN: 0, HELDOUT: 1}
EXACT_DUPLICATE, NEAR_DUPLICATE = 2, 3
_REMOVED_NAMES = {EXACT_DUPLICATE: "exact duplicates", NEAR_DUPLICATE: "near duplicates"}
NUM_DUPLICATE_SAMPLES = 3
_PAIRS_PER_COMPARISON = 4096
_SUMMARY_FILE = "selection.json"


@dataclass(frozen=True)
class Selection:
    """Codes of the documents of each conversion job, in files."""

    code_files: tuple[Path, ...]
    removed: dict[str, int]
    """Number of duplicates by kind."""
    duplicates: list[list[str]]
    """Beginnings of some kept documents, each with that of a near duplicate."""


def select_documents(
    directory: Path, job_dirs: Sequence[Path], settings: DocumentSettings
) -> Selection:
    """Write one code per document of the finished jobs to `directory`, unless it is complete.

    The memory is about 40 bytes per document.
    """
    files = tuple(directory / f"{job_dir.name}.npy" for job_dir in job_dirs)
    try:
        summary = load_work_file(directory / _SUMMARY_FILE)
        return Selection(files, summary["removed"], summary["duplicates"])
    except FileNotFoundError:
        durable_files.make_directory(directory)
    paths = [job_dir / conversion_job.SIGNATURE_FILE for job_dir in job_dirs]
    signatures = SignatureFiles(paths, settings.needs_minhash)
    codes, pairs = _compute_codes(signatures, settings)
    for file, some in zip(files, np.split(codes, np.cumsum(signatures.sizes)[:-1]), strict=True):
        np.save(file, some)
        durable_files.fsync_file(file)
    removed = {
        name: count
        for code, name in _REMOVED_NAMES.items()
        if (count := int(np.count_nonzero(codes == code)))
    }
    texts = [[_read_beginning(job_dirs, *signatures.locate(n)) for n in pair] for pair in pairs]
    write_json(directory / _SUMMARY_FILE, {"removed": removed, "duplicates": texts})
    return Selection(files, removed, texts)


def _compute_codes(
    signatures: SignatureFiles, settings: DocumentSettings
) -> tuple[NDArray[np.uint8], list[list[int]]]:
    codes = np.zeros(len(signatures), np.uint8)
    pairs: list[list[int]] = []
    digests = signatures.read_digests()
    if settings.heldout is not None:
        with np.errstate(over="ignore"):
            seed = document_signatures.mix_bits(np.array([settings.seed], np.uint64))
            values = document_signatures.mix_bits(digests[:, 0] ^ seed)
        codes[values < np.uint64(settings.heldout * 2**64)] = CODES[HELDOUT]
    if settings.dedup is not None:
        codes[_find_exact_duplicates(digests)] = EXACT_DUPLICATE
    del digests
    if settings.needs_minhash:
        for first, second in _find_near_duplicates(signatures, codes):
            codes[second] = NEAR_DUPLICATE
            for kept, removed in zip(first, second, strict=True):
                if len(pairs) < NUM_DUPLICATE_SAMPLES:
                    pairs.append([int(kept), int(removed)])
    return codes, pairs


def _find_exact_duplicates(digests: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the documents whose digest an earlier document has."""
    order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable
    ordered = digests[order]
    is_equal = (ordered[1:] == ordered[:-1]).all(axis=1)
    duplicates: NDArray[np.int64] = order[1:][is_equal]
    return duplicates


def _find_near_duplicates(
    signatures: SignatureFiles, codes: NDArray[np.uint8]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield arrays of documents, and of later documents to remove since they are similar.

    Documents that share all values of a band are compared with the first of them. Documents with a
    code of duplicates are ignored, also codes that the caller sets meanwhile.
    """
    for band in range(document_signatures.NUM_BANDS):
        keys = signatures.read_band_keys(band)
        order = np.argsort(keys, kind="stable")
        order = order[codes[order] < EXACT_DUPLICATE]
        ordered = keys[order]
        is_first = np.ones(len(order), bool)
        is_first[1:] = ordered[1:] != ordered[:-1]
        firsts = order[np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))]
        first, second = firsts[~is_first], order[~is_first]
        for start in range(0, len(first), _PAIRS_PER_COMPARISON):
            some = slice(start, start + _PAIRS_PER_COMPARISON)
            is_similar = signatures.compute_similarity(first[some], second[some]) >= MIN_SIMILARITY
            yield first[some][is_similar], second[some][is_similar]


@dataclass(frozen=True)
class SelectionJob:
    """Copy of the documents of a conversion job that have one code."""

    job_dir: Path
    codes: Path
    code: int
    output_dir: Path
    num_bytes: int
    """Bytes of text of the job."""


def run_selection_job(job: SelectionJob, on_progress: Callable[[int], None]) -> None:
    """Write the selected documents to the shards of `output_dir`.

    Raises:
        OSError: If writing fails.
    """
    codes = np.load(job.codes, mmap_mode="r")

    def write(_: Path, writer: ArrowShardWriter) -> JobReceipt:
        start = 0
        for documents in _read_job(job.job_dir):
            selected = codes[start : start + len(documents)] == job.code
            for document in itertools.compress(documents, selected.tolist()):
                writer.add(document)
            on_progress(sum(map(len, documents)))
            start += len(documents)
        return JobReceipt((), (), ())

    conversion_job.write_job_shards(job.output_dir, write)


def _read_job(job_dir: Path) -> Iterator[list[bytes]]:
    """Yield the documents of a finished conversion job, one record batch at a time."""
    receipt = conversion_job.load_receipt(job_dir)
    assert receipt is not None
    for shard in receipt.parts:
        yield from arrow_shards.read_shard(job_dir / shard.name)


def _read_beginning(job_dirs: Sequence[Path], job: int, row: int) -> str:
    for documents in _read_job(job_dirs[job]):
        if row < len(documents):
            return str(documents[row], "utf-8")[:MAX_SAMPLE_CHARACTERS]
        row -= len(documents)
    raise AssertionError("each signature has a document")
