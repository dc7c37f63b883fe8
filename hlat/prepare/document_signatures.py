"""Signatures of documents: a digest of the text, and MinHash values for near duplicates.

Two documents share each MinHash value with a probability that equals the Jaccard similarity of
their sets of word sequences (Broder, On the resemblance and containment of documents, 1997).
"""

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hlat.config.config_errors import ConfigError

NUM_BANDS = 14
ROWS_PER_BAND = 8
"""Values of a band. These numbers and `WORDS_PER_SHINGLE` are those of FineWeb (Penedo et al., The
FineWeb datasets, 2024): of two documents with similarity 0.75, 77% share a band."""
NUM_HASHES = NUM_BANDS * ROWS_PER_BAND
WORDS_PER_SHINGLE = 5
MAX_CHARACTERS = 1 << 20
"""Characters of a document from which its MinHash values are computed."""

_DIGEST = ("digest", "<u8", (2,))
EXACT_DTYPE = np.dtype([_DIGEST])
MINHASH_DTYPE = np.dtype([_DIGEST, ("minhash", "<u4", (NUM_HASHES,))])
_SHINGLES_PER_UPDATE = 2048
_RECORDS_PER_WRITE = 1024
_WORD = re.compile(r"\w+")


def validate_minhash_library() -> None:
    """Raise ConfigError if the library that computes MinHash values is not installed."""
    try:
        import datasketch  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "dedup=minhash needs the package datasketch; pip install 'hlat[prepare]'"
        ) from error


class SignatureWriter:
    """Writer of the signatures of documents to a new file, in order.

    As a context manager, it flushes the file to disk unless the body raises.
    """

    def __init__(self, path: Path, has_minhash: bool) -> None:
        self._dtype = MINHASH_DTYPE if has_minhash else EXACT_DTYPE
        self._file = path.open("xb")
        self._records = np.zeros(_RECORDS_PER_WRITE, self._dtype)
        self._num_pending = 0

    def add(self, document: bytes) -> None:
        """Add the signature of a document in UTF-8."""
        record = self._records[self._num_pending]
        record["digest"] = np.frombuffer(compute_digest(document), "<u8")
        if self._dtype is MINHASH_DTYPE:
            record["minhash"] = compute_minhash(str(document, "utf-8"))
        self._num_pending += 1
        if self._num_pending == len(self._records):
            self._write()

    def __enter__(self) -> "SignatureWriter":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if error_type is None:
                self._write()
                self._file.flush()
                os.fsync(self._file.fileno())

    def _write(self) -> None:
        self._file.write(self._records[: self._num_pending].tobytes())
        self._num_pending = 0


def compute_digest(document: bytes) -> bytes:
    """Return a digest of 16 bytes."""
    return hashlib.blake2b(document, digest_size=16).digest()


def compute_minhash(text: str) -> NDArray[np.uint32]:
    """Return the MinHash values of the sequences of `WORDS_PER_SHINGLE` words of a text."""
    from datasketch import MinHash

    words = [word.encode() for word in _WORD.findall(text[:MAX_CHARACTERS].lower())]
    count = max(1, len(words) - WORDS_PER_SHINGLE + 1)
    shingles = sorted({b" ".join(words[i : i + WORDS_PER_SHINGLE]) for i in range(count)})
    minhash = MinHash(num_perm=NUM_HASHES, seed=1, scheme="affine32")
    for start in range(0, len(shingles), _SHINGLES_PER_UPDATE):
        minhash.update_batch(shingles[start : start + _SHINGLES_PER_UPDATE])
    values: NDArray[np.uint32] = minhash.hashvalues.astype(np.uint32)
    return values


class SignatureFiles:
    """Signatures of all documents, memory-mapped from several files and numbered in order."""

    def __init__(self, paths: Sequence[Path], has_minhash: bool) -> None:
        dtype = MINHASH_DTYPE if has_minhash else EXACT_DTYPE
        self._arrays = [
            np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)
            for path in paths
        ]
        self.sizes = [len(array) for array in self._arrays]
        self._ends = np.cumsum(self.sizes)

    def __len__(self) -> int:
        """Return the number of documents."""
        return sum(self.sizes)

    def locate(self, number: int) -> tuple[int, int]:
        """Return the file and the row of a document."""
        file = int(np.searchsorted(self._ends, number, side="right"))
        return file, number - int(self._ends[file]) + self.sizes[file]

    def read_digests(self) -> NDArray[np.uint64]:
        """Return the digests, [documents, 2]."""
        empty = np.zeros((0, 2), np.uint64)
        return np.concatenate([empty, *(array["digest"] for array in self._arrays)])

    def read_band_keys(self, band: int) -> NDArray[np.uint64]:
        """Return one key per document, equal for documents with equal values in the band."""
        keys = [np.zeros(0, np.uint64)]
        columns = slice(band * ROWS_PER_BAND, (band + 1) * ROWS_PER_BAND)
        for array in self._arrays:
            for start in range(0, len(array), 1 << 16):
                values = array["minhash"][start : start + (1 << 16), columns]
                keys.append(_hash_rows(values.astype(np.uint64)))
        return np.concatenate(keys)

    def compute_similarity(
        self, first: NDArray[np.int64], second: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return the estimated similarity of pairs of documents."""
        equal = self._gather(first) == self._gather(second)
        similarity: NDArray[np.float64] = equal.mean(axis=1)
        return similarity

    def _gather(self, numbers: NDArray[np.int64]) -> NDArray[np.uint32]:
        values = np.zeros((len(numbers), NUM_HASHES), np.uint32)
        files = np.searchsorted(self._ends, numbers, side="right")
        for file in np.unique(files):
            selected = files == file
            rows = numbers[selected] - (self._ends[file] - self.sizes[file])
            values[selected] = self._arrays[file]["minhash"][rows]
        return values


def mix_bits(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the output function of SplitMix64 for each value."""
    with np.errstate(over="ignore"):
        mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return result


def _hash_rows(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    keys = np.zeros(len(values), np.uint64)
    with np.errstate(over="ignore"):
        for column in values.T:
            keys = mix_bits(keys * np.uint64(31) + column + np.uint64(0x9E3779B97F4A7C15))
    return keys
