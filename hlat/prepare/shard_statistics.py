"""Statistics of prepared shards: counts, length histogram, tokens, digests and samples.

Each shard is read once, in a worker process. Results are files, so that an interrupted report
continues.
"""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from hlat.config.config_errors import ConfigError
from hlat.data.token_encoders import ReferenceEncoder
from hlat.data.tokenizer import parse_tokenizer
from hlat.data.tokenizer_probe import MAX_TOKENIZER_BYTES
from hlat.data.tokenizer_round_trip import measure_lost_text, sample_texts
from hlat.prepare import arrow_shards, document_signatures
from hlat.prepare.corpus_manifest import write_json
from hlat.prepare.document_filters import MAX_SAMPLE_CHARACTERS
from hlat.storage.bounded_files import read_bounded

FIRST_BIN_BITS = 6
NUM_BINS = 18
"""Bins of the histogram: less than 2**6 bytes, less than 2**7, ..., all longer documents."""
NUM_SAMPLES = 5
_DOCUMENTS_PER_STEP = 64


@dataclass(frozen=True)
class StatisticsJob:
    """Reading of one shard."""

    shard: Path
    num_rows: int
    num_bytes: int
    tokenizer: Path | None
    output: Path
    """JSON file of the result; the digests are in a file with the suffix .npy."""

    @property
    def digest_file(self) -> Path:
        """File with 8 bytes per document."""
        return self.output.with_suffix(".npy")


def load_encoder(path: Path) -> ReferenceEncoder:
    """Return the encoder of a tokenizer.json.

    Raises:
        ConfigError: If the file cannot be read or is not a tokenizer.
    """
    try:
        content = read_bounded(path, MAX_TOKENIZER_BYTES)
    except OSError as error:
        raise ConfigError(f"tokenizer={path}: cannot be read ({error.strerror})") from error
    label = f"tokenizer={path}:"
    return ReferenceEncoder(parse_tokenizer(label, content), label)


def run_statistics_job(job: StatisticsJob, on_progress: Callable[[int], None]) -> None:
    """Read the shard and write the result.

    Raises:
        ConfigError: If the tokenizer cannot be used.
        OSError: If reading or writing fails.
    """
    encoder = None if job.tokenizer is None else load_encoder(job.tokenizer)
    documents_by_bin, bytes_by_bin = np.zeros((2, NUM_BINS), np.int64)
    digests = np.zeros(job.num_rows, np.uint64)
    sample_rows = {*np.linspace(0, job.num_rows - 1, NUM_SAMPLES).astype(int).tolist()}
    samples = []
    num_tokens, row = 0, 0
    for batch in arrow_shards.read_shard(job.shard):
        for start in range(0, len(batch), _DOCUMENTS_PER_STEP):
            documents = batch[start : start + _DOCUMENTS_PER_STEP]
            lengths = np.fromiter(map(len, documents), np.int64, len(documents))
            bins = np.clip(np.frexp(lengths)[1] - FIRST_BIN_BITS, 0, NUM_BINS - 1)
            documents_by_bin += np.bincount(bins, minlength=NUM_BINS)
            bytes_by_bin += np.bincount(bins, lengths, NUM_BINS).astype(np.int64)
            for number, document in enumerate(documents, row):
                digest = document_signatures.compute_digest(document)
                digests[number] = int.from_bytes(digest[:8], "little")
                if number in sample_rows:
                    samples.append(str(document, "utf-8"))
            if encoder is not None:
                ids = encoder.encode([str(document, "utf-8") for document in documents])
                num_tokens += sum(len(one) + 1 for one in ids)  # and one end-of-text token
            row += len(documents)
            on_progress(int(lengths.sum()))
    with job.digest_file.open("wb") as file:
        np.save(file, digests)
        file.flush()
        os.fsync(file.fileno())
    lost = None
    if encoder is not None:
        lost = asdict(measure_lost_text(encoder.tokenizer, sample_texts(samples)))
    result = {
        "tokens": None if encoder is None else num_tokens,
        "lost_text": lost,
        "documents_by_bin": documents_by_bin.tolist(),
        "bytes_by_bin": bytes_by_bin.tolist(),
        "samples": [text[:MAX_SAMPLE_CHARACTERS] for text in samples],
    }
    write_json(job.output, result)
