"""Encoders of text to token ids: the reference library and one that is many times faster.

The library `tokenizers` defines the ids of a tokenizer.json. It is fast enough for a large model,
but too slow for a small one. The fast library encodes only texts without code points on which the
two libraries may differ.
"""

import functools
import importlib.metadata
import json
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray

from hlat.config.config_errors import ConfigError

FAST_LIBRARY = "gigatoken"
TOKENS_PER_RELOAD = 1 << 26
"""Number of tokens after which the fast library is reloaded. Its word cache grows by up to 10 bytes
per token (text without spaces, base64), and version 0.10 never evicts an entry."""

_LAST_LATIN = 0xFF
_LAST_CLASSIFIED = 0x3FFFF
"""The planes beyond contain private use, tags and variation selectors."""
_MAX_REASON_CHARACTERS = 300


@contextmanager
def translate_errors(label: str) -> Iterator[None]:
    """Raise the exceptions and panics of a tokenizer library as ConfigError."""
    try:
        yield
    except BaseException as error:
        if not (isinstance(error, Exception) or _is_panic(error)):
            raise
        reason = str(error)[:_MAX_REASON_CHARACTERS] or type(error).__name__
        raise ConfigError(
            f"{label} cannot encode a text ({reason}); use another tokenizer.json"
        ) from error


def _is_panic(error: BaseException) -> bool:
    """Return True for a panic of a Rust library, whose type PyO3 does not export."""
    return type(error).__name__ == "PanicException"


class TokenEncoder(Protocol):
    """Interface of encoders that add no special tokens."""

    def encode(self, documents: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return one array of token ids per text."""
        ...


class ReferenceEncoder:
    """Encoder of the library `tokenizers`, which defines the ids."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, label: str = "tokenizer.json") -> None:
        self.tokenizer, self._label = tokenizer, label

    def encode(self, documents: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return one array of token ids per text.

        Raises:
            ConfigError: If the tokenizer cannot encode a text.
        """
        with translate_errors(self._label):
            encodings = self.tokenizer.encode_batch_fast(list(documents), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]


class FastEncoder:
    """Encoder of the library gigatoken, on the calling thread.

    The reference encodes texts with code points that the libraries may read differently.
    """

    def __init__(self, name: str, content: bytes, reference: TokenEncoder) -> None:
        """Load a tokenizer.json; `name` is the value of `data.tokenizer`.

        Raises:
            ConfigError: If the library is missing or does not support the tokenizer.
        """
        self._reference = reference
        self._label = f"data.encoder=fast: data.tokenizer={name}"
        self._content = _remove_special_tokens(content)
        try:
            self._load()
        except ImportError as error:
            raise ConfigError(
                f"data.encoder=fast needs {FAST_LIBRARY}, which is not installed ({error}); run "
                "pip install 'hlat[fast]', or set data.encoder=reference"
            ) from error
        except BaseException as error:
            if not (isinstance(error, (RuntimeError, ValueError)) or _is_panic(error)):
                raise
            reason = str(error).strip().splitlines()[0]
            version = importlib.metadata.version(FAST_LIBRARY)
            raise ConfigError(
                f"data.encoder=fast: {FAST_LIBRARY} {version} does not know a "
                f"tokenizer like data.tokenizer={name} ({reason}); set data.encoder=reference"
            ) from error

    def _load(self) -> None:
        from gigatoken import gigatoken_rs

        self._library: Any = gigatoken_rs.load_hf_json(self._content)
        self._tokens_until_reload = TOKENS_PER_RELOAD

    def encode(self, documents: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return one array of token ids per text.

        Raises:
            ConfigError: If the tokenizer cannot encode a text.
        """
        arrays = []
        with translate_errors(self._label):
            for text in documents:
                if not text.isascii() and _has_differing_code_point(text):
                    arrays += self._reference.encode([text])
                    continue
                ids: NDArray[np.uint32] = self._library.encode(text)
                arrays.append(ids.view(np.int32))
                self._tokens_until_reload -= ids.size
                if self._tokens_until_reload < 0:
                    self._load()
        return arrays


def _has_differing_code_point(text: str) -> bool:
    """Return True if the libraries may differ on a code point of the text."""
    code_points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    # The libraries agree on the code points of Latin-1, which are most of a European text
    is_other = code_points > _LAST_LATIN
    num_others = np.count_nonzero(is_other)
    if num_others < len(code_points) // 2:
        code_points = code_points[is_other]
    # Without the copy of the default mode, which raises an error for an index out of range
    return bool(_find_differing_code_points().take(code_points, mode="clip").any())


@functools.cache
def _find_differing_code_points() -> NDArray[np.bool_]:
    """Return True for each code point on which the libraries may differ, [0x110000].

    gigatoken 0.10 implements Unicode 17 and the pattern library of `tokenizers` Unicode 16; Python
    lacks all code points of 17. The normalizer of `tokenizers` lacks combining marks from Unicode
    10 on, which are among those that Unicode 3.2 lacks.
    """
    differing = np.ones(sys.maxunicode + 1, np.bool_)
    for code_point in range(_LAST_CLASSIFIED + 1):
        character = chr(code_point)
        category = unicodedata.category(character)
        differing[code_point] = category == "Cn" or (
            category.startswith("M") and unicodedata.ucd_3_2_0.category(character) == "Cn"
        )
    return differing


def _remove_special_tokens(content: bytes) -> bytes:
    """Remove special tokens, which the fast library would always find in the text."""
    settings = json.loads(content)
    added = settings.get("added_tokens") or []
    settings["added_tokens"] = [token for token in added if not token.get("special")]
    return json.dumps(settings).encode()
