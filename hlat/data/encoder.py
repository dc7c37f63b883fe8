"""Text to token ids, by the library that defines them and by one that is many times faster.

A tokenizer.json means what the library `tokenizers` makes of it. Its speed feeds a large model but
not a small one, and a second library is of use only if nobody has to wonder whether the ids are the
same. So the fast one reads no document that it is not known to read alike (see parity.py).
"""

import importlib.metadata
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray

from hlat.config.errors import ConfigError

FAST_LIBRARY = "gigatoken"
TOKENS_PER_LOAD = 1 << 26
"""Tokens after which the fast library is loaded anew. It remembers every word that it has met (up
to 10 bytes of memory per token: text without spaces, base64) and version 0.10 forgets none."""


class PieceEncoder(Protocol):
    """Turns texts into token ids and adds none of its own."""

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return one array of token ids per text."""
        ...


class ReferenceEncoder:
    """The library `tokenizers`, which defines the ids."""

    def __init__(self, rust: tokenizers.Tokenizer) -> None:
        self._rust = rust

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return one array of token ids per text."""
        encodings = self._rust.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]


class FastEncoder:
    """The library gigatoken, on the calling thread."""

    def __init__(self, name: str, content: bytes) -> None:
        """Load a tokenizer.

        Args:
            name: What `data.tokenizer` says, for messages.
            content: The tokenizer.json.

        Raises:
            ConfigError: If the library is missing, or does not know this kind of tokenizer.
        """
        self._content = _without_control_tokens(content)
        try:
            self._load()
        except ImportError as error:
            raise ConfigError(
                f"data.encoder=fast needs {FAST_LIBRARY}, which is not installed ({error}); run "
                "pip install 'hlat[fast]', or set data.encoder=reference"
            ) from error
        except (RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"data.encoder=fast: {FAST_LIBRARY} {fast_version()} does not know a tokenizer "
                f"like data.tokenizer={name} ({reason}); set data.encoder=reference"
            ) from error

    def _load(self) -> None:
        from gigatoken import gigatoken_rs

        self._library: Any = gigatoken_rs.load_hf_json(self._content)
        self._tokens_left = TOKENS_PER_LOAD

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return one array of token ids per text."""
        return [self.encode_one(text) for text in texts]

    def encode_one(self, text: str | bytes) -> NDArray[np.int32]:
        """Return the token ids of a text, which may be given as UTF-8."""
        ids: NDArray[np.uint32] = self._library.encode(text)
        self._tokens_left -= ids.size
        if self._tokens_left < 0:
            self._load()
        return ids.view(np.int32)


class ExactEncoder:
    """The fast encoder, but for texts with code points that the two libraries read differently."""

    def __init__(
        self, fast: FastEncoder, reference: PieceEncoder, unlike: Iterable[tuple[int, int]]
    ) -> None:
        """Combine two encoders.

        Args:
            fast: Reads all other texts.
            reference: Reads texts that contain a listed code point.
            unlike: First and last code points of ranges outside ASCII.
        """
        self._fast = fast
        self._reference = reference
        self._unlike = _compile(unlike)

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return one array of token ids per text."""
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> NDArray[np.int32]:
        if text.isascii():
            return self._fast.encode_one(text)
        data = text.encode()
        for first_byte, pattern in self._unlike:
            if first_byte in data and pattern.search(data):
                return self._reference.encode([text])[0]
        return self._fast.encode_one(data)


def fast_version() -> str:
    """Version of the fast library."""
    return importlib.metadata.version(FAST_LIBRARY)


def _without_control_tokens(content: bytes) -> bytes:
    """Remove special tokens: this library would find them in the text and has no switch for it."""
    settings = json.loads(content)
    added = settings.get("added_tokens") or []
    settings["added_tokens"] = [token for token in added if not token.get("special")]
    return json.dumps(settings).encode()


def _compile(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, re.Pattern[bytes]]]:
    """Patterns that find any of some code points in UTF-8, by the first byte of what they find.

    Bytes are searched because most documents lack those first bytes, and one byte is found in a
    hundredth of the time that a class of characters takes.
    """
    tree: dict[int, Any] = {}
    for first, last in ranges:
        for code_point in range(first, last + 1):
            node = tree
            for byte in chr(code_point).encode():
                node = node.setdefault(byte, {})
    return [(byte, re.compile(_pattern({byte: rest}), re.DOTALL)) for byte, rest in tree.items()]


def _pattern(tree: dict[int, Any]) -> bytes:
    """A pattern for byte sequences that share beginnings, given as nested dictionaries."""
    if not any(tree.values()):
        return b"[" + b"".join(b"\\x%02x" % byte for byte in tree) + b"]"
    branches = [b"\\x%02x" % byte + _pattern(rest) for byte, rest in tree.items()]
    return branches[0] if len(branches) == 1 else b"(?:" + b"|".join(branches) + b")"
