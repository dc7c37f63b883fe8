"""Source bytes of each token: its part of the UTF-8 bytes of a text.

Decoded tokens are not the source: a sequence may start inside of a character, tokenizers prepend
spaces, and normalizers change text. The offsets of an encoding refer to the original text.
"""

import codecs
import json
from functools import cached_property

import numpy as np
import tokenizers
from numpy.typing import NDArray

from hlat.data.document_chunks import DocumentChunker, split_document
from hlat.data.token_encoders import translate_errors

_CHUNK_BYTES = 1 << 20
"""Bytes that are encoded at once; offsets and spellings need about 100 bytes per token."""


class SourceByteEncoder:
    """Encoder that returns the ids of the reference encoder, and the source bytes of each.

    The counts of a text sum to its UTF-8 bytes if it has a token:

    * Text that the tokenizer drops (spaces, control characters) belongs to the token that follows,
      at the end of a text to the last one.
    * Tokens that divide a character get the bytes that they spell, if they spell bytes (byte-level
      tokens, `<0xE6>`). Otherwise the last of them gets the character.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, chunker: DocumentChunker, label: str
    ) -> None:
        """Use a tokenizer and the rule that divides its documents; `label` is part of messages."""
        self._tokenizer, self._chunker, self._label = tokenizer, chunker, label

    def encode(self, text: str) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return token ids, and the source bytes of each.

        Raises:
            ConfigError: If the tokenizer cannot encode the text.
        """
        document = memoryview(text.encode())
        ids, byte_ends = [np.empty(0, np.int32)], [np.empty(0, np.int64)]
        for chunk_start, chunk_end in split_document(document, self._chunker, _CHUNK_BYTES):
            start, end = self._chunker.get_encoded_range(chunk_start, chunk_end)
            chunk = str(document[start:end], "utf-8")
            with translate_errors(self._label):
                (encoding,) = self._tokenizer.encode_batch([chunk], add_special_tokens=False)
            ids.append(np.array(encoding.ids, np.int32))
            byte_ends.append(start + self._find_ends(chunk, encoding))
        all_ends = np.concatenate(byte_ends)
        all_ends[-1:] = len(document)
        return np.concatenate(ids), np.diff(all_ends, prepend=0).astype(np.int32)

    def _find_ends(self, text: str, encoding: tokenizers.Encoding) -> NDArray[np.int64]:
        """Return the byte at which the part of each token ends, non-decreasing."""
        starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        byte_offsets = _compute_byte_offsets(text)
        next_starts = np.append(starts[1:], len(text))
        next_starts = np.minimum.accumulate(next_starts[::-1])[::-1]
        byte_ends = byte_offsets[np.minimum(ends, next_starts)]
        spelled, previous = 0, -1
        for i in np.flatnonzero(ends > next_starts):  # the next token shares a character
            piece = self._byte_pieces.get(encoding.ids[i], b"")
            if starts[i] < next_starts[i]:
                spelled = _count_incomplete_bytes(piece)
            else:
                spelled = len(piece) + (spelled if next_starts[i] == previous else 0)
            previous = next_starts[i]
            byte_ends[i] = min(byte_ends[i] + spelled, byte_offsets[ends[i]])
        return np.maximum.accumulate(byte_ends)

    @cached_property
    def _byte_pieces(self) -> dict[int, bytes]:
        """Bytes of the tokens that spell bytes, by id."""
        definition = json.loads(self._tokenizer.to_str())
        spelling = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        pieces = {i: spelling[token] for token, i in vocabulary.items() if token in spelling}
        if '"type": "ByteLevel"' in json.dumps(
            [definition["normalizer"], definition["pre_tokenizer"]]
        ):
            byte_of = _build_byte_alphabet()
            pieces |= {
                i: bytes(byte_of[character] for character in token)
                for token, i in vocabulary.items()
                if byte_of.keys() >= set(token)
            }
        return pieces


def _compute_byte_offsets(text: str) -> NDArray[np.int64]:
    """Return the number of UTF-8 bytes before each character of a text, and their total."""
    code_points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    num_bytes = 1 + sum((code_points >= limit).astype(np.int64) for limit in (0x80, 0x800, 0x10000))
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(num_bytes, dtype=np.int64)])


def _count_incomplete_bytes(piece: bytes) -> int:
    """Return the number of bytes at the end that start a character without completing it."""
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    decoder.decode(piece)
    return len(decoder.getstate()[0])


def _build_byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of the byte-level alphabet of GPT-2."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}
