"""Held-out documents packed into sequences, with the document and the source bytes of each token.

Loss per token depends on the tokenizer. Bits per byte, the sum of the loss over the sum of the
source bytes of the same tokens, compare runs across tokenizers and sequence lengths.
"""

import hashlib
import io
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hlat.config.config_errors import ConfigError
from hlat.config.data import DataConfig
from hlat.data.data_cache import get_cache_dir, replace_file
from hlat.data.data_source import DataSource
from hlat.data.packed_sequences import PackedSequences, build_packed_sequences, compute_loss_mask
from hlat.data.permutation import Permutation
from hlat.data.tokenizer import Tokenizer

_OVERSAMPLING = 4
"""Encoded text relative to the selected sequences. Every rank encodes it before the first step, and
held-out files may contain far more text than an evaluation uses."""
_CHARACTERS_PER_TOKEN = 4
"""About the mean of English text."""
_MIN_DOCUMENTS = 8
"""Minimum number of documents in the encoded text."""
FORMAT_VERSION = 1
"""To increase when the tokens or source bytes of a document in the cache directory change. All runs
of a study encode the same text."""


@dataclass(frozen=True)
class HeldoutSequences:
    """Held-out sequences of one source.

    A sequence starts with the last token of the one before, so that every token is a target once.
    The first token of a document is predicted from BOS, or from the EOS of the document before.

    Attributes:
        sequences: Token ids [n, s]; the last sequence may be padded.
        documents: Index of the held-out document of each token, [n, s].
        num_bytes: Source bytes of each token (`SourceByteEncoder`), [n, s]; BOS and EOS have none.
        is_target: True for each token in the loss, [n, s].
        document_hashes: Hash of the text of each held-out document.
    """

    sequences: PackedSequences
    documents: NDArray[np.int32]
    num_bytes: NDArray[np.int32]
    is_target: NDArray[np.bool_]
    document_hashes: NDArray[np.uint64]

    def select(self, rows: slice | NDArray[np.int64]) -> "HeldoutSequences":
        """Return some of the sequences."""
        return HeldoutSequences(
            self.sequences.select(rows),
            self.documents[rows],
            self.num_bytes[rows],
            self.is_target[rows],
            self.document_hashes,
        )

    def select_evenly(self, num_sequences: int) -> "HeldoutSequences":
        """Return up to `num_sequences` sequences, evenly spaced."""
        total = len(self.documents)
        count = min(num_sequences, total)
        return self if count == total else self.select(np.arange(count) * total // count)

    def sum_by_document(self, values: NDArray[np.generic]) -> NDArray[np.float64]:
        """Return the sum of the values [n, s] of targets for each held-out document."""
        documents, weights = self.documents[self.is_target], values[self.is_target]
        sums = np.bincount(documents, weights, len(self.document_hashes))
        return sums.astype(np.float64)

    @cached_property
    def target_tokens(self) -> NDArray[np.float64]:
        """Number of targets of each document."""
        return self.sum_by_document(self.is_target)

    @cached_property
    def target_bytes(self) -> NDArray[np.float64]:
        """Source bytes of the targets of each document."""
        return self.sum_by_document(self.num_bytes)

    @cached_property
    def digest(self) -> str:
        """Hash of the documents with targets and the number of their bytes that are targets."""
        used = self.target_tokens > 0
        content = self.document_hashes[used].tobytes() + self.target_bytes[used].tobytes()
        return hashlib.blake2b(content, digest_size=8).hexdigest()


@dataclass(frozen=True)
class _PackedText:
    """Tokens of all documents in order, after a token that starts the first one, all [tokens]."""

    tokens: NDArray[np.int32]
    documents: NDArray[np.int32]
    num_bytes: NDArray[np.int32]
    document_hashes: NDArray[np.uint64]


def pack_heldout_sequences(
    source: DataSource,
    tokenizer: Tokenizer,
    num_sequences: int,
    sequence_length: int,
    data: DataConfig,
) -> HeldoutSequences:
    """Pack the held-out documents of a source, and select up to `num_sequences` sequences.

    Raises:
        ConfigError: If the held-out documents have no text in the loss.
    """
    documents = _limit_documents(source.read_heldout_documents(), num_sequences, sequence_length)
    return pack_documents(
        documents,
        tokenizer,
        num_sequences,
        sequence_length,
        data,
        f"the {source.num_heldout_documents} held-out documents of data.sources.{source.name}",
        "hold out more",
        cached=True,
    )


def _limit_documents(
    documents: Iterable[str], num_sequences: int, sequence_length: int
) -> Iterator[str]:
    """Yield at least `num_sequences` documents with enough text; truncate long documents."""
    num_needed = _OVERSAMPLING * num_sequences * sequence_length * _CHARACTERS_PER_TOKEN
    max_length = max(num_needed // _MIN_DOCUMENTS, sequence_length * _CHARACTERS_PER_TOKEN)
    num_characters = 0
    for index, document in enumerate(documents):
        if index >= num_sequences and num_characters >= num_needed:
            return
        truncated = document[:max_length]
        num_characters += len(truncated)
        yield truncated


def pack_documents(
    documents: Iterable[str],
    tokenizer: Tokenizer,
    num_sequences: int | None,
    sequence_length: int,
    data: DataConfig,
    label: str,
    remedy: str,
    cached: bool = False,
) -> HeldoutSequences:
    """Pack documents, and select up to `num_sequences` sequences; None: all.

    `label` and `remedy` are parts of the messages. `cached` stores the tokens in the cache
    directory.

    Raises:
        ConfigError: If the documents have no text in the loss.
    """
    text = (_load_or_encode if cached else _encode_documents)(documents, tokenizer)
    num_tokens = len(text.tokens)
    starts = np.arange(0, num_tokens - 1, sequence_length - 1)
    if len(starts) == 0:
        raise ConfigError(f"{label} have no token; {remedy}")
    if num_sequences is not None and num_sequences < len(starts):
        starts = starts[_select_sequences(text.documents[starts + 1], num_sequences)]
    is_real = np.ones((len(starts), sequence_length), np.bool_)
    is_real[-1] = starts[-1] + np.arange(sequence_length) < num_tokens
    tokens, document_ids, num_bytes = (
        _take_windows(array, starts, sequence_length)
        for array in (text.tokens, text.documents, text.num_bytes)
    )
    packed = build_packed_sequences(tokens, tokenizer.eos_token_id, data, tokenizer.bos_token_id)
    sequences = PackedSequences(tokens, packed.document_ids, None if is_real.all() else is_real)
    is_target = compute_loss_mask(sequences, data.loss_mask)
    if not num_bytes[is_target].any():
        raise ConfigError(
            f"{label} leave the loss no text in sequences of {sequence_length} tokens; {remedy}, "
            "or set data.loss_mask=false"
        )
    return HeldoutSequences(sequences, document_ids, num_bytes, is_target, text.document_hashes)


def _load_or_encode(documents: Iterable[str], tokenizer: Tokenizer) -> _PackedText:
    """Return the tokens of documents, from the cache directory if they were encoded before."""
    documents = [*documents]
    path = compute_cache_path(documents, tokenizer.cache_key)
    names = [one.name for one in fields(_PackedText)]
    if (arrays := load_arrays(path)) is not None and [*arrays] == names:
        return _PackedText(**arrays)  # type: ignore[arg-type]
    text = _encode_documents(documents, tokenizer)
    save_arrays(path, {name: getattr(text, name) for name in names})
    return text


def _encode_documents(documents: Iterable[str], tokenizer: Tokenizer) -> _PackedText:
    """Return the tokens of documents; those without a token are omitted, as in training."""
    starts_with_bos = tokenizer.bos_token_id is not None
    first = np.array([] if starts_with_bos else [tokenizer.eos_token_id], np.int32)
    tokens, num_bytes, hashes = [first], [np.zeros_like(first)], []
    for document in documents:
        ids, bytes_of_ids = tokenizer.encode_with_bytes(document)
        if ids.size:
            tokens.append(ids)
            num_bytes.append(bytes_of_ids)
            hashes.append(hashlib.blake2b(document.encode(), digest_size=8).digest())
    lengths = [len(ids) for ids in tokens]
    indices = np.maximum(np.arange(-1, len(hashes), dtype=np.int32), 0)
    return _PackedText(
        np.concatenate(tokens),
        np.repeat(indices, lengths),
        np.concatenate(num_bytes),
        np.frombuffer(b"".join(hashes), np.uint64),
    )


def _take_windows(
    array: NDArray[np.int32], starts: NDArray[np.int64], length: int
) -> NDArray[np.int32]:
    """Return `length` elements from each start; the last element is repeated beyond the end."""
    padded = np.pad(array, (0, length), mode="edge")
    return np.lib.stride_tricks.sliding_window_view(padded, length)[starts]


def _select_sequences(document_of_row: NDArray[np.int32], count: int) -> NDArray[np.int64]:
    """Return the indices of `count` sequences, in order.

    Every document contributes one sequence before any contributes a second one, so that a long
    document does not replace the others. Documents, and sequences within a document, are selected
    in a pseudorandom order.

    Args:
        document_of_row: Document of the first target of each sequence, non-decreasing.
        count: Number of sequences to select.
    """
    num_rows = len(document_of_row)
    shuffled = Permutation(num_rows, ("heldout sequences",))(np.arange(num_rows))
    by_document = shuffled[np.argsort(document_of_row[shuffled], kind="stable")]
    _, first, sizes = np.unique(document_of_row, return_index=True, return_counts=True)
    rank_in_document = np.empty(num_rows, np.int64)
    rank_in_document[by_document] = np.arange(num_rows) - np.repeat(first, sizes)
    selected = shuffled[np.argsort(rank_in_document[shuffled], kind="stable")[:count]]
    return np.sort(selected)


def compute_cache_path(documents: Iterable[str], tokenizer_key: str) -> Path:
    """Return the path of the encoded documents of a tokenizer."""
    digest = hashlib.blake2b(f"{FORMAT_VERSION} {tokenizer_key}".encode(), digest_size=16)
    for document in documents:
        content = document.encode()
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return get_cache_dir() / "heldout" / f"{digest.hexdigest()}.npz"


def load_arrays(path: Path) -> dict[str, NDArray[np.generic]] | None:
    """Return the arrays of a file by name, or None if it is missing or damaged."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile):
        return None


def save_arrays(path: Path, arrays: dict[str, NDArray[np.generic]]) -> None:
    """Write arrays to a file, or write nothing if the cache directory is not writable."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, buffer.getvalue())
