"""Encoders of text to token ids: the reference library and one that is many times faster.

The library `tokenizers` defines the ids of a tokenizer.json. It is fast enough for a large model,
but too slow for a small one. The fast library encodes only texts without code points on which the
two libraries differ (see encoder_parity.py).
"""

import importlib.metadata
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray

from hlat.config.config_errors import ConfigError

FAST_LIBRARY = "gigatoken"
TOKENS_PER_RELOAD = 1 << 26
"""Number of tokens after which the fast library is reloaded. Its word cache grows by up to 10 bytes
per token (text without spaces, base64), and version 0.10 never evicts an entry."""


class TokenEncoder(Protocol):
    """Interface of encoders that add no special tokens."""

    def encode(self, documents: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return one array of token ids per text."""
        ...


class ReferenceEncoder:
    """Encoder of the library `tokenizers`, which defines the ids."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, documents: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return one array of token ids per text."""
        encodings = self._tokenizer.encode_batch_fast(list(documents), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]


class FastEncoder:
    """Encoder of the library gigatoken, on the calling thread."""

    def __init__(self, name: str, content: bytes) -> None:
        """Load a tokenizer.json; `name` is the value of `data.tokenizer`.

        Raises:
            ConfigError: If the library is missing or does not support the tokenizer.
        """
        self._content = _remove_special_tokens(content)
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
                f"data.encoder=fast: {FAST_LIBRARY} {get_fast_library_version()} does not know a "
                f"tokenizer like data.tokenizer={name} ({reason}); set data.encoder=reference"
            ) from error

    def _load(self) -> None:
        from gigatoken import gigatoken_rs

        self._library: Any = gigatoken_rs.load_hf_json(self._content)
        self._tokens_until_reload = TOKENS_PER_RELOAD

    def encode(self, documents: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return one array of token ids per text."""
        return [self.encode_one(text) for text in documents]

    def encode_one(self, text: str | bytes) -> NDArray[np.int32]:
        """Return the token ids of a text, given as str or UTF-8."""
        ids: NDArray[np.uint32] = self._library.encode(text)
        self._tokens_until_reload -= ids.size
        if self._tokens_until_reload < 0:
            self._load()
        return ids.view(np.int32)


class FastEncoderWithFallback:
    """The fast encoder, with the reference for texts with code points on which they differ."""

    def __init__(
        self,
        fast: FastEncoder,
        reference: TokenEncoder,
        differing_ranges: Iterable[tuple[int, int]],
    ) -> None:
        """Combine two encoders; the ranges (first, last) of code points exclude ASCII."""
        self._fast = fast
        self._reference = reference
        self._fallback_patterns = _compile_utf8_patterns(differing_ranges)

    def encode(self, documents: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return one array of token ids per text."""
        return [self._encode(text) for text in documents]

    def _encode(self, text: str) -> NDArray[np.int32]:
        if text.isascii():
            return self._fast.encode_one(text)
        data = text.encode()
        for first_byte, pattern in self._fallback_patterns:
            if first_byte in data and pattern.search(data):
                return self._reference.encode([text])[0]
        return self._fast.encode_one(data)


def get_fast_library_version() -> str:
    """Return the version of the fast library."""
    return importlib.metadata.version(FAST_LIBRARY)


def _remove_special_tokens(content: bytes) -> bytes:
    """Remove special tokens, which the fast library would always find in the text."""
    settings = json.loads(content)
    added = settings.get("added_tokens") or []
    settings["added_tokens"] = [token for token in added if not token.get("special")]
    return json.dumps(settings).encode()


def _compile_utf8_patterns(
    ranges: Iterable[tuple[int, int]],
) -> list[tuple[int, re.Pattern[bytes]]]:
    """Return (first byte, pattern) pairs that find the code points of the ranges in UTF-8.

    Most documents lack these first bytes, and a search for one byte needs a hundredth of the time
    of a search for a character class.
    """
    tree: dict[int, Any] = {}
    for first, last in ranges:
        for code_point in range(first, last + 1):
            node = tree
            for byte in chr(code_point).encode():
                node = node.setdefault(byte, {})
    return [
        (byte, re.compile(_build_utf8_pattern({byte: rest}), re.DOTALL))
        for byte, rest in tree.items()
    ]


def _build_utf8_pattern(tree: dict[int, Any]) -> bytes:
    """Return a regular expression for the byte sequences of a prefix tree."""
    if not any(tree.values()):
        return b"[" + b"".join(b"\\x%02x" % byte for byte in tree) + b"]"
    branches = [b"\\x%02x" % byte + _build_utf8_pattern(rest) for byte, rest in tree.items()]
    return branches[0] if len(branches) == 1 else b"(?:" + b"|".join(branches) + b")"
